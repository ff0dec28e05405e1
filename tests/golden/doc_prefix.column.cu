struct MaskInputs {
  int nq, nk;
  Segments doc_;
  Vector prefix_;
};

MASKC_FN Bounds mask_column(const MaskInputs& in, int b, int h, int key) {
  const idx nq = in.nq, k = key;
  const Found doc_at_k = find(in.doc_, b, k);
  if (doc_at_k.i >= 0) {
    const Read prefix_at_k = read(in.prefix_, b, h, doc_at_k.i);
    if (prefix_at_k.ok && k < doc_at_k.start + prefix_at_k.value) {
      return bounds(nq, doc_at_k.end, nq, 0, doc_at_k.start);
    }
    return bounds(nq, doc_at_k.end, nq, 0, k);
  }
  return bounds(nq, 0, nq, 0, nq);
}
