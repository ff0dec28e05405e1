// Kernels that follow each other in a stream and were launched to overlap (programmatic dependent launch).
#pragma once
#include "device/types.cuh"

// Waits until the kernel before this one is complete and what it wrote can be seen. Returns at once where the launch did
// not ask to overlap.
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The kernel after this one may start once every CTA has said so or has ended.
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
