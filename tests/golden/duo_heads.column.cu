struct MaskInputs {
  int nq, nk;
  Segments doc_;
  Flags streaming_;
  Scalar window_;
  Scalar sinks_;
};

MASKC_FN Bounds mask_column(const MaskInputs& in, int b, int h, int key) {
  const idx nq = in.nq, k = key;
  const Found doc_at_k = find(in.doc_, b, k);
  if (doc_at_k.i >= 0) {
    const Read streaming_at_h = read(in.streaming_, b, h, 0);
    if (streaming_at_h.value) {
      const idx sinks_value = scalar(in.sinks_, b);
      if (k < doc_at_k.start + sinks_value) {
        return bounds(nq, doc_at_k.end, nq, 0, 0);
      }
      const idx window_value = scalar(in.window_, b);
      return bounds(nq, min2(doc_at_k.end, k + window_value), nq, 0, 0);
    }
    return bounds(nq, doc_at_k.end, nq, 0, 0);
  }
  return bounds(nq, 0, nq, 0, 0);
}
