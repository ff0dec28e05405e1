struct MaskInputs {
  int nq, nk;
  Segments part_;
};

MASKC_FN Bounds mask_column(const MaskInputs& in, int b, int h, int key) {
  const idx nq = in.nq, k = key;
  const Found part_at_k = find(in.part_, b, k);
  if (part_at_k.i >= 0) {
    const Found part_last = find_last(in.part_, b);
    return bounds(nq, part_last.end, nq, part_at_k.end, max2(part_last.start, k));
  }
  const Found part_last = find_last(in.part_, b);
  return bounds(nq, part_last.end, nq, 0, max2(part_last.start, k));
}
