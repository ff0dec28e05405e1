// What the generated text of a mask column needs: bound inputs, lookups, exact integer arithmetic. Plain C++ under
// NVRTC and on the host. Every lookup is safe for every index: outside it yields index -1 or `ok` false, and zeros.
#pragma once

#ifdef __CUDACC_RTC__
#define MASKC_FN static __device__ __forceinline__
#else
#define MASKC_FN static inline
#endif

#ifndef MASKC_INDEX
#define MASKC_INDEX long long
#endif
typedef MASKC_INDEX idx;

// Masked rows of a column: [lts, lte) and [uts, ute).
struct Bounds { int lts, lte, uts, ute; };

// Segments or spans: int32 [batch, count] half-open ranges in the order of their ordinals, which is that of their starts.
struct Segments { const int* starts; const int* ends; long long batch_stride; int count; };
// int32 or bool [batch, heads, length]; a stride of 0 broadcasts.
struct Vector { const int* data; long long batch_stride, head_stride; int length; };
struct Flags { const unsigned char* data; long long batch_stride, head_stride; int length; };
// One value, or where the values of the batch items lie.
struct Scalar { const int* at; int batch_stride, value; };

struct Found { idx i, start, end; };  // ordinal, or -1
struct Read { idx value; bool ok; };

MASKC_FN idx min2(idx a, idx b) { return a < b ? a : b; }
MASKC_FN idx max2(idx a, idx b) { return a > b ? a : b; }

// Towards minus infinity; b >= 1.
MASKC_FN idx floor_div(idx a, idx b) { return a / b - (a % b < 0); }
MASKC_FN idx floor_mod(idx a, idx b) { idx r = a % b; return r < 0 ? r + b : r; }

// Both slots cut to [0, nq); an empty lower slot is (nq, nq), an empty upper one (0, 0).
MASKC_FN Bounds bounds(idx nq, idx lower_lo, idx lower_hi, idx upper_lo, idx upper_hi) {
  lower_lo = max2(lower_lo, 0), lower_hi = min2(lower_hi, nq);
  upper_lo = max2(upper_lo, 0), upper_hi = min2(upper_hi, nq);
  const bool lower = lower_lo < lower_hi, upper = upper_lo < upper_hi;
  return {int(lower ? lower_lo : nq), int(lower ? lower_hi : nq), int(upper ? upper_lo : 0), int(upper ? upper_hi : 0)};
}

MASKC_FN idx scalar(const Scalar& s, int b) { return s.at ? s.at[(long long)b * s.batch_stride] : s.value; }

MASKC_FN Read read(const Vector& v, int b, int h, idx i) {
  const bool ok = 0 <= i && i < v.length;
  return {ok ? v.data[b * v.batch_stride + h * v.head_stride + i] : 0, ok};
}
MASKC_FN Read read(const Flags& v, int b, int h, idx i) {
  const bool ok = 0 <= i && i < v.length;
  return {ok ? v.data[b * v.batch_stride + h * v.head_stride + i] != 0 : 0, ok};
}

// How many of the ascending values v[0..n) are < x (strict) or <= x.
MASKC_FN int count_below(const int* v, int n, idx x) {
  int lo = 0;
  while (lo < n) { const int mid = lo + (n - lo) / 2; if (v[mid] < x) lo = mid + 1; else n = mid; }
  return lo;
}

// The segment that holds a token: the last one that starts at or before it, for empty ones share their start with the next.
MASKC_FN Found find(const Segments& s, int b, idx token) {
  const int* starts = s.starts + b * s.batch_stride;
  const int* ends = s.ends + b * s.batch_stride;
  const int i = count_below(starts, s.count, token + 1) - 1;
  if (i < 0 || token >= ends[i]) return {-1, 0, 0};
  return {i, starts[i], ends[i]};
}
MASKC_FN bool inside(const Found& f, idx token) { return f.i >= 0 && f.start <= token && token < f.end; }

// The first or last segment, not an empty one, that lies in `parent`; where it has none, the end of the parent.
MASKC_FN Found find_first(const Segments& s, int b, const Found& parent) {
  const int* starts = s.starts + b * s.batch_stride;
  const int* ends = s.ends + b * s.batch_stride;
  if (parent.i < 0) return {-1, 0, 0};
  for (int i = count_below(starts, s.count, parent.start); i < s.count && ends[i] <= parent.end; ++i)
    if (starts[i] < ends[i]) return {i, starts[i], ends[i]};
  return {s.count, parent.end, parent.end};
}
MASKC_FN Found find_last(const Segments& s, int b, const Found& parent) {
  const int* starts = s.starts + b * s.batch_stride;
  const int* ends = s.ends + b * s.batch_stride;
  if (parent.i < 0) return {-1, 0, 0};
  for (int i = count_below(starts, s.count, parent.end) - 1; i >= 0 && starts[i] >= parent.start; --i)
    if (starts[i] < ends[i]) return {i, starts[i], ends[i]};
  return {s.count, parent.end, parent.end};
}

// End of the last segment, 0 if there is none.
MASKC_FN idx set_end(const Segments& s, int b) { return s.count == 0 ? 0 : s.ends[b * s.batch_stride + s.count - 1]; }

// The first or last of a set without a parent; where all are empty, one at 0.
MASKC_FN Found or_zero(const Found& f) { return f.start < f.end ? f : Found{f.i, 0, 0}; }
MASKC_FN Found find_first(const Segments& s, int b) { return or_zero(find_first(s, b, {0, 0, set_end(s, b)})); }
MASKC_FN Found find_last(const Segments& s, int b) { return or_zero(find_last(s, b, {0, 0, set_end(s, b)})); }

// First token of the first segment whose ordinal is >= `ordinal`; the end of the last one if there is none.
MASKC_FN idx start_of(const Segments& s, int b, idx ordinal) {
  return ordinal >= s.count ? set_end(s, b) : s.starts[b * s.batch_stride + max2(ordinal, 0)];
}

// First index whose value in a never decreasing vector is >= `value`, the length if there is none.
MASKC_FN idx first_at_least(const Vector& v, int b, int h, idx value) {
  return count_below(v.data + b * v.batch_stride + h * v.head_stride, v.length, value);
}
