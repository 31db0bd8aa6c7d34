// Where the blocks of a plan lie in memory: the native mirror of unisono.algorithms.ir.binding.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "plan.h"

namespace unisono {

struct Range {
  std::int64_t offset;
  std::int64_t length;
};

// One of `parts` near-equal parts of `length`; the first (length mod parts) are one longer.
Range split(std::int64_t length, std::int64_t parts, std::int64_t part);

// The blocks of one buffer, in elements.
class Blocks {
 public:
  Blocks() = default;
  static Blocks even(std::int64_t elements, std::int64_t blocks);
  static Blocks counted(const std::vector<std::int64_t>& counts);
  static Blocks copies(const Blocks& original, std::int64_t copies);

  Range at(std::int64_t block) const {
    if (copies_ == 1 && offsets_.empty()) return part_of(block);
    return at_copy(block);
  }
  std::int64_t elements() const { return elements_ * copies_; }
  std::int64_t count() const { return blocks_ * copies_; }

 private:
  // The division of `split`, done beforehand.
  Range part_of(std::int64_t block) const {
    return {block * quotient_ + std::min(block, remainder_), quotient_ + (block < remainder_ ? 1 : 0)};
  }
  Range at_copy(std::int64_t block) const;

  std::int64_t elements_ = 0;  // of one copy
  std::int64_t blocks_ = 0;    // of one copy
  std::int64_t copies_ = 1;
  std::int64_t quotient_ = 0;  // of even parts
  std::int64_t remainder_ = 0;
  std::vector<std::int64_t> offsets_;  // empty: even parts
};

using AllBlocks = std::array<Blocks, buffer_kinds>;
// The blocks of SCRATCH that is like another buffer, of which the blocks are given.
Blocks scratch_blocks(const ScratchLayout& scratch, const AllBlocks& blocks);

}  // namespace unisono
