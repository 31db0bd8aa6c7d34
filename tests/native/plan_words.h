// Hand-written plans for the tests, in the format of unisono.algorithms.ir.encode.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "plan/plan.h"

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
  std::int64_t scratch_copies = 0;  // copies of the input
  std::vector<std::vector<ItemWords>> lanes;

  std::vector<std::int64_t> encode() const;
};

inline constexpr std::int64_t received_first = 1;
inline constexpr std::int64_t lower = 2;

Operand input(std::int64_t start, std::int64_t count, std::int64_t advance = 0);
Operand output(std::int64_t start, std::int64_t count, std::int64_t advance = 0);
Operand scratch(std::int64_t start, std::int64_t count);

// Allreduces over `size` ranks. Plans that lower a result do so where each element is complete.
PlanWords ring_allreduce(std::int64_t size, std::int64_t rank);
PlanWords direct_allreduce(std::int64_t size, std::int64_t rank);    // everything to every rank, summed in rank order
PlanWords doubling_allreduce(std::int64_t size, std::int64_t rank);  // size 2 or 4
PlanWords two_lane_allreduce(std::int64_t rank);                     // size 2: the second lane waits for the first one
PlanWords empty_groups_allreduce(std::int64_t rank);  // size 2: some groups have no steps, and one runs 0 times

}  // namespace unisono::testing
