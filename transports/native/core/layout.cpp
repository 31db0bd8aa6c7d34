#include "layout.h"

#include <algorithm>
#include <stdexcept>

namespace unisono {
Range split(std::int64_t length, std::int64_t parts, std::int64_t part) {
  const std::int64_t quotient = length / parts;
  const std::int64_t remainder = length % parts;
  return {part * quotient + std::min(part, remainder), quotient + (part < remainder ? 1 : 0)};
}

Blocks Blocks::even(std::int64_t elements, std::int64_t blocks) {
  Blocks made;
  made.elements_ = blocks == 0 ? 0 : elements;
  made.blocks_ = blocks;
  made.quotient_ = blocks == 0 ? 0 : elements / blocks;
  made.remainder_ = blocks == 0 ? 0 : elements % blocks;
  return made;
}

Blocks Blocks::counted(const std::vector<std::int64_t>& counts) {
  Blocks made;
  made.blocks_ = static_cast<std::int64_t>(counts.size());
  made.offsets_.push_back(0);
  for (const std::int64_t count : counts) {
    if (count < 0) throw std::invalid_argument("a count is negative");
    made.offsets_.push_back(made.offsets_.back() + count);
  }
  made.elements_ = made.offsets_.back();
  return made;
}

Blocks Blocks::copies(const Blocks& original, std::int64_t copies) {
  Blocks made = original;
  made.copies_ = copies;
  return made;
}

Range Blocks::at_copy(std::int64_t block) const {
  const std::int64_t copy = block / blocks_;
  const std::int64_t within = block % blocks_;
  Range range;
  if (offsets_.empty()) {
    range = part_of(within);
  } else {
    const auto index = static_cast<std::size_t>(within);
    range = {offsets_[index], offsets_[index + 1] - offsets_[index]};
  }
  range.offset += copy * elements_;
  return range;
}

Blocks scratch_blocks(const ScratchLayout& scratch, const AllBlocks& blocks) {
  const Blocks& like = blocks[static_cast<std::size_t>(scratch.like)];
  return Blocks::copies(scratch.block < 0 ? like : Blocks::even(like.at(scratch.block).length, 1), scratch.copies);
}

}  // namespace unisono
