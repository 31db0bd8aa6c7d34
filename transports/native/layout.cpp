#include "layout.h"

#include <algorithm>
#include <stdexcept>

namespace unisono {
namespace {

// Appends the parts of `extents` that are in `range`.
void append_range(std::vector<Extent>& found, const std::vector<Extent>& extents, const Range& range) {
  std::int64_t place = 0;
  for (const Extent& extent : extents) {
    const std::int64_t begin = std::max(range.offset, place);
    const std::int64_t end = std::min(range.offset + range.length, place + extent.count);
    if (begin < end) {
      found.push_back(extent);
      found.back().count = end - begin;
    }
    place += extent.count;
  }
}

}  // namespace

Range split(std::int64_t length, std::int64_t parts, std::int64_t part) {
  const std::int64_t quotient = length / parts;
  const std::int64_t remainder = length % parts;
  return {part * quotient + std::min(part, remainder), quotient + (part < remainder ? 1 : 0)};
}

Blocks Blocks::even(std::int64_t elements, std::int64_t blocks) {
  Blocks made;
  made.elements_ = blocks == 0 ? 0 : elements;
  made.blocks_ = blocks;
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

Range Blocks::at(std::int64_t block) const {
  const std::int64_t copy = block / blocks_;
  const std::int64_t within = block % blocks_;
  Range range;
  if (offsets_.empty()) {
    range = split(elements_, blocks_, within);
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

std::vector<Extent> scratch_extents(const Memory& memory) {
  const ScratchLayout& scratch = memory.plan->scratch();
  if (scratch.like < 0) {
    Extent extent = (*memory.extents)[0].at(0);
    extent.count = (*memory.blocks)[static_cast<std::size_t>(BufferKind::scratch)].elements();
    return {extent};
  }
  const auto like = static_cast<std::size_t>(scratch.like);
  const Blocks& blocks = (*memory.blocks)[like];
  const Range copied = scratch.block < 0 ? Range{0, blocks.elements()} : blocks.at(scratch.block);
  std::vector<Extent> found;
  for (std::int64_t copy = 0; copy < scratch.copies; ++copy) append_range(found, (*memory.extents)[like], copied);
  return found;
}

Cursor::Cursor(const Memory& memory, const Operand& operand, std::int64_t iteration, std::int64_t segment)
    : memory_(&memory), operand_(&operand), iteration_(iteration), segment_(segment), block_(-1) {
  settle();
}

void Cursor::settle() {
  const Blocks& blocks = (*memory_->blocks)[static_cast<std::size_t>(operand_->buffer)];
  done_ = 0;
  while (++block_ < operand_->count) {
    const Range block = blocks.at(memory_->plan->block(*operand_, iteration_, block_));
    const Range part = split(block.length, memory_->segments, segment_);
    range_ = {block.offset + part.offset, part.length};
    if (range_.length > 0) return;
  }
}

Piece Cursor::piece() const {
  const auto& extents = (*memory_->extents)[static_cast<std::size_t>(operand_->buffer)];
  std::int64_t offset = range_.offset + done_;
  const std::int64_t left = range_.length - done_;
  for (const Extent& extent : extents) {
    if (offset < extent.count) {
      const std::int64_t count = std::min(left, extent.count - offset);
      return {extent.data + static_cast<std::size_t>(offset) * extent.itemsize(), count, extent.dtype, extent.combine};
    }
    offset -= extent.count;
  }
  throw std::out_of_range("a block lies outside its buffer");
}

void Cursor::advance(std::int64_t elements) {
  done_ += elements;
  if (done_ == range_.length) settle();
}

std::size_t Cursor::nbytes() const {
  std::size_t total = 0;
  for (Cursor walk = *this; !walk.at_end();) {
    const Piece piece = walk.piece();
    total += static_cast<std::size_t>(piece.count) * piece.itemsize();
    walk.advance(piece.count);
  }
  return total;
}

}  // namespace unisono
