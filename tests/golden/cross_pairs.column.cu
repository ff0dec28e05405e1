struct MaskInputs {
  int nq, nk;
  Vector row_pair_;
  Vector key_pair_;
};

MASKC_FN Bounds mask_column(const MaskInputs& in, int b, int h, int key) {
  const idx nq = in.nq, k = key;
  const Read key_pair_at_k = read(in.key_pair_, b, h, k);
  const idx row_pair_first = first_at_least(in.row_pair_, b, h, key_pair_at_k.value + 1);
  const idx row_pair_first_2 = first_at_least(in.row_pair_, b, h, key_pair_at_k.value);
  return bounds(nq, row_pair_first, nq, 0, row_pair_first_2);
}
