// Plans written by hand for the tests, in the form that unisono.algorithms.ir.encode gives them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "plan.h"

namespace unisono::testing {

struct StepWords {
  Opcode opcode;
  std::int64_t peer = 0;
  std::int64_t peer_advance = 0;
  std::optional<Operand> dst;
  std::vector<Operand> sources;
  std::int64_t flags = 0;
};

struct GroupWords {
  std::vector<StepWords> steps;
  std::vector<Dependency> after;
};

struct ItemWords {
  std::int64_t times = 1;
  std::vector<GroupWords> groups;
};

struct PlanWords {
  std::int64_t size = 1;
  std::int64_t rank = 0;
  std::int64_t input_blocks = 1;
  std::int64_t output_blocks = 1;
  std::int64_t scratch_copies = 0;  // of the input
  std::vector<std::vector<ItemWords>> lanes;

  std::vector<std::int64_t> encode() const;
};

inline constexpr std::int64_t received_first = 1;
inline constexpr std::int64_t lower = 2;

Operand input(std::int64_t start, std::int64_t count, std::int64_t advance = 0);
Operand output(std::int64_t start, std::int64_t count, std::int64_t advance = 0);
Operand scratch(std::int64_t start, std::int64_t count);

// Allreduces over `size` ranks. Those that lower do so where each element is complete.
PlanWords ring_allreduce(std::int64_t size, std::int64_t rank);
PlanWords direct_allreduce(std::int64_t size, std::int64_t rank);    // everything to everybody, summed in order of rank
PlanWords doubling_allreduce(std::int64_t size, std::int64_t rank);  // size 2 or 4
PlanWords two_lane_allreduce(std::int64_t rank);                     // size 2: the second lane waits for the first one
PlanWords hollow_allreduce(std::int64_t rank);  // size 2: among groups without steps, and repeats of none

}  // namespace unisono::testing
