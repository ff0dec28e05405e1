// The order in which work items are dealt.
#pragma once
#include "device/types.cuh"

// Place of an item: position of its Q block in its head's order of work, and the head of all batch items.
struct Dealt {
  int rank, head;
};

// Giants (the first ranks of every head) come before the other ranks. Both parts go through the heads group by group, and
// inside a group rank by rank, so that what is worked on at one time reads the K and V of few heads.
DEVICE Dealt deal(int item, int ranks, int giants, int heads, int group_heads) {
  const bool giant = item < giants * heads;
  const int place = giant ? item : item - giants * heads;
  const int group_items = group_heads * (giant ? giants : ranks - giants);
  const int first = place / group_items * group_heads, in_group = place % group_items;
  const int members = min(group_heads, heads - first);
  return {(giant ? 0 : giants) + in_group / members, first + in_group % members};
}
