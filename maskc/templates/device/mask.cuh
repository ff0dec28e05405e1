// Element tests of a PARTIAL tile on an accumulator fragment s: s[4j + e] is row `row` + 8 (e / 2) and column
// 8 j + e % 2 from the thread's first column. Masked scores become -inf whatever they were, NaN too. `bounds` is the
// shared-memory address of the first column's entry of an int32 vector.
#pragma once
#include "device/sync.cuh"

// Columns beyond `limit` of `row`, and beyond limit + 8 of row + 8: the causal triangle.
template <int N>
DEVICE void mask_right_of(float (&s)[N], int limit) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[4 * j + e] = 8 * j + e % 2 - 8 * (e / 2) > limit ? neg_inf() : s[4 * j + e];
  }
}

// Columns from `end` on, in every row: keys past the end of the sequence.
template <int N>
DEVICE void mask_columns_from(float (&s)[N], int end) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[4 * j + e] = 8 * j + e % 2 >= end ? neg_inf() : s[4 * j + e];
  }
}

// Rows from the column's bound on.
template <int N>
DEVICE void mask_rows_from(float (&s)[N], int row, u32 bounds) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    int b[2];
    load_shared_v2(bounds + 32 * j, b[0], b[1]);
#pragma unroll
    for (int e = 0; e < 4; ++e) s[4 * j + e] = row + 8 * (e / 2) >= b[e % 2] ? neg_inf() : s[4 * j + e];
  }
}

// Rows before the column's bound.
template <int N>
DEVICE void mask_rows_before(float (&s)[N], int row, u32 bounds) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    int b[2];
    load_shared_v2(bounds + 32 * j, b[0], b[1]);
#pragma unroll
    for (int e = 0; e < 4; ++e) s[4 * j + e] = row + 8 * (e / 2) < b[e % 2] ? neg_inf() : s[4 * j + e];
  }
}

// Rows from one bound on and before the other.
template <int N>
DEVICE void mask_rows_between(float (&s)[N], int row, u32 starts, u32 ends) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    int a[2], b[2];
    load_shared_v2(starts + 32 * j, a[0], a[1]);
    load_shared_v2(ends + 32 * j, b[0], b[1]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = row + 8 * (e / 2);
      s[4 * j + e] = r >= a[e % 2] && r < b[e % 2] ? neg_inf() : s[4 * j + e];
    }
  }
}
