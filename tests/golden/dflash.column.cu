struct MaskInputs {
  int nq, nk;
  Scalar S_;
  Vector anchor_;
};

MASKC_FN Bounds mask_column(const MaskInputs& in, int b, int h, int key) {
  const idx nq = in.nq, k = key;
  const idx S_value = scalar(in.S_, b);
  if (k < S_value) {
    const idx anchor_first = first_at_least(in.anchor_, b, h, k + 1);
    return bounds(nq, nq, nq, 0, anchor_first);
  }
  return bounds(nq, 4 * floor_div(k - S_value, 4) + 4, nq, 0, 4 * floor_div(k - S_value, 4));
}
