struct MaskInputs {
  int nq, nk;
  Scalar L_;
};

MASKC_FN Bounds mask_column(const MaskInputs& in, int b, int h, int key) {
  const idx nq = in.nq, k = key;
  const idx L_value = scalar(in.L_, b);
  if (k < L_value) {
    return bounds(nq, min2(L_value, 2 * floor_div(k, 2) + 2), nq, 0, 2 * floor_div(k, 2));
  }
  if (2 * floor_div(k - L_value, 2) + 3 <= L_value) {
    return bounds(nq, L_value, L_value + 2 * floor_div(k - L_value, 2), 0, 2 * floor_div(k - L_value, 2) + 2);
  }
  return bounds(nq, nq, nq, 0, L_value + 2 * floor_div(k - L_value, 2));
}
