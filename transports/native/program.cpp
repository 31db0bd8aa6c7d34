#include "program.h"

#include <algorithm>
#include <stdexcept>

namespace unisono {
namespace {

// Steps of a program that is resolved beforehand: some 100 KiB.
constexpr std::int64_t most_resolved = 1024;

std::int64_t total(const std::vector<Extent>& extents) {
  std::int64_t count = 0;
  for (const Extent& extent : extents) count += extent.count;
  return count;
}

// Appends the parts of `extents` that are in `range`.
void append_range(std::vector<Extent>& found, const std::vector<Extent>& extents, const Range& range) {
  std::int64_t place = 0;
  for (const Extent& extent : extents) {
    const std::int64_t begin = std::max(range.offset, place);
    const std::int64_t end = std::min(range.offset + range.length, place + extent.count);
    if (begin < end) found.push_back({end - begin, extent.dtype, extent.combine, extent.divisor});
    place += extent.count;
  }
}

}  // namespace

Program::Program(std::shared_ptr<const Plan> plan, AllBlocks blocks, std::array<std::vector<Extent>, 2> extents,
                 std::int64_t segments)
    : plan_(std::move(plan)), blocks_(std::move(blocks)), segments_(segments) {
  for (std::size_t kind = 0; kind < extents.size(); ++kind) {
    extents_[kind] = std::move(extents[kind]);
    for (const Extent& extent : extents_[kind]) nbytes_[kind] += extent.nbytes();
    if (total(extents_[kind]) < blocks_[kind].elements())
      throw std::invalid_argument("an array is shorter than its blocks");
  }
  lay_out_scratch();
  std::int64_t steps = 0;
  for (std::size_t lane = 0; lane < lanes(); ++lane) instances_ += groups(lane) * segments_;
  if (instances_ > most_resolved) return;
  std::vector<std::vector<Work>> resolved(lanes());
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    for (std::int64_t group = 0; group < groups(lane); ++group) {
      steps += static_cast<std::int64_t>(plan_->steps(*plan_->group_at(lane, group).group).size()) * segments_;
      if (steps > most_resolved) return;
      for (std::int64_t segment = 0; segment < segments_; ++segment)
        resolve(lane, group, segment, resolved[lane].emplace_back());
    }
  }
  resolved_ = std::move(resolved);
}

// Where SCRATCH has counts of its own, its elements are like those of INPUT, which then is one array, maybe an empty
// one.
void Program::lay_out_scratch() {
  auto& scratch = extents_[static_cast<std::size_t>(BufferKind::scratch)];
  const ScratchLayout& layout = plan_->scratch();
  if (plan_->partition(BufferKind::scratch).blocks == 0) return;
  if (layout.like < 0) {
    const Extent& like = extents_[0].at(0);
    scratch.push_back({blocks_[2].elements(), like.dtype, like.combine, like.divisor});
  } else {
    const auto like = static_cast<std::size_t>(layout.like);
    const Range copied = layout.block < 0 ? Range{0, blocks_[like].elements()} : blocks_[like].at(layout.block);
    for (std::int64_t copy = 0; copy < layout.copies; ++copy) append_range(scratch, extents_[like], copied);
  }
  for (const Extent& extent : scratch) {
    scratch_offsets_.push_back(nbytes_[2]);
    nbytes_[2] += extent.nbytes();
  }
}

void Program::resolve(std::size_t lane, std::int64_t group, std::int64_t segment, Work& work) const {
  work.actions.clear();
  work.pieces.clear();
  work.places.clear();
  const GroupAt at = plan_->group_at(lane, group);
  for (const Step& step : plan_->steps(*at.group)) resolve_step(step, at.iteration, segment, work);
}

void Program::resolve_step(const Step& step, std::int64_t iteration, std::int64_t segment, Work& work) const {
  static thread_local std::vector<Runs> operands;
  operands.resize(static_cast<std::size_t>(step.dst >= 0) + static_cast<std::size_t>(step.sources));
  std::size_t next = 0;
  if (step.dst >= 0) find_runs(plan_->operand(step.dst), iteration, segment, operands[next++]);
  for (std::int64_t i = 0; i < step.sources; ++i, ++next) {
    const Operand& source = plan_->operand(step.first_source + i);
    if (source.peer < 0 || source.peer == plan_->rank())
      find_runs(source, iteration, segment, operands[next]);
    else
      find_runs_of_peer(source, step.opcode == Opcode::read ? plan_->peer(step, iteration) : source.peer, iteration,
                        segment, plan_->operand(step.dst), operands[next]);
  }
  Action action{};
  action.opcode = step.opcode;
  action.received_first = step.received_first;
  action.peer = static_cast<std::int32_t>(plan_->peer(step, iteration));
  action.operands = operands.size();
  if (!operands.empty()) refine(operands, step.lower, action, work);
  if (action.nbytes != 0 || operands.empty()) work.actions.push_back(action);
}

void Program::find_runs(const Operand& operand, std::int64_t iteration, std::int64_t segment, Runs& runs) const {
  runs.clear();
  const Blocks& blocks = blocks_[static_cast<std::size_t>(operand.buffer)];
  for (std::int64_t i = 0; i < operand.count; ++i) {
    Range range = blocks.at(plan_->block(operand, iteration, i));
    if (segments_ > 1) {
      const Range part = split(range.length, segments_, segment);
      range = {range.offset + part.offset, part.length};
    }
    if (range.length > 0) add_runs(operand.buffer, range, runs);
  }
}

// The extents of a peer's buffer lie one after the other. Where the buffer is one block, that may be of another length
// than this rank's, as in an allgather of varying shares: its elements are those of the block that the step writes.
void Program::find_runs_of_peer(const Operand& operand, std::int64_t peer, std::int64_t iteration, std::int64_t segment,
                                const Operand& dst, Runs& runs) const {
  runs.clear();
  const std::size_t base = peer_base(peer, operand.buffer);
  const auto add = [&](BufferKind like, std::int64_t origin, const Range& block) {
    const Range part = split(block.length, segments_, segment);
    if (part.length == 0) return;  // and SCRATCH of no elements has no extent
    add_runs_of_peer(base, like, origin, {block.offset + part.offset, part.length}, runs);
  };
  if (plan_->partition(operand.buffer).blocks > 1) {
    const Blocks& blocks = blocks_[static_cast<std::size_t>(operand.buffer)];
    for (std::int64_t i = 0; i < operand.count; ++i)
      add(operand.buffer, 0, blocks.at(plan_->block(operand, iteration, i)));
    return;
  }
  if (dst.count != 1) throw std::invalid_argument("a peer's only block is read into one block");
  const Range block = blocks_[static_cast<std::size_t>(dst.buffer)].at(plan_->block(dst, iteration, 0));
  add(dst.buffer, block.offset, block);
}

// Appends what a buffer of a peer has in `range`, counted as in the buffer `like` of this rank; it begins at `origin`.
void Program::add_runs_of_peer(std::size_t base, BufferKind like, std::int64_t origin, Range range, Runs& runs) const {
  std::int64_t start = 0;
  std::size_t offset = 0;  // of the extent, or of what it has after `origin`
  for (const Extent& extent : extents_[static_cast<std::size_t>(like)]) {
    const std::int64_t begin = std::max(start, origin);
    const std::int64_t end = start + extent.count;
    const std::int64_t first = std::max(begin, range.offset);
    const std::int64_t last = std::min(end, range.offset + range.length);
    if (first < last)
      runs.push_back(
          {{base, offset + static_cast<std::size_t>(first - begin) * extent.itemsize()}, last - first, &extent});
    if (begin < end) offset += static_cast<std::size_t>(end - begin) * extent.itemsize();
    start = end;
  }
}

void Program::add_runs(BufferKind kind, Range range, Runs& runs) const {
  const auto& extents = extents_[static_cast<std::size_t>(kind)];
  const bool scratch = kind == BufferKind::scratch;
  const std::size_t first_base = kind == BufferKind::input ? 0 : extents_[0].size();
  std::int64_t start = 0;
  for (std::size_t i = 0; i < extents.size() && range.length > 0; ++i) {
    const Extent& extent = extents[i];
    if (range.offset < start + extent.count) {
      const std::int64_t within = range.offset - start;
      const std::int64_t count = std::min(range.length, extent.count - within);
      const std::size_t offset = static_cast<std::size_t>(within) * extent.itemsize();
      const Place place = scratch ? Place{scratch_base(), scratch_offsets_[i] + offset} : Place{first_base + i, offset};
      Run* last = runs.empty() ? nullptr : &runs.back();
      const bool joins = last != nullptr && last->place.base == place.base && last->extent->is_like(extent) &&
                         last->place.offset + static_cast<std::size_t>(last->count) * extent.itemsize() == place.offset;
      if (joins) {
        last->count += count;
      } else {
        runs.push_back({place, count, &extent});
      }
      range = {range.offset + count, range.length - count};
    }
    start += extent.count;
  }
}

void Program::refine(std::span<Runs> operands, bool lowers, Action& action, Work& work) {
  action.first_piece = work.pieces.size();
  action.first_place = work.places.size();
  static thread_local std::vector<std::size_t> at;
  at.assign(operands.size(), 0);
  const auto ended = [&](std::size_t operand) { return at[operand] == operands[operand].size(); };
  while (!ended(0)) {
    std::int64_t count = operands[0][at[0]].count;
    for (std::size_t i = 1; i < operands.size(); ++i) {
      if (ended(i)) break;
      count = std::min(count, operands[i][at[i]].count);
    }
    const Extent& extent = *operands[0][at[0]].extent;
    work.pieces.push_back(
        {count, extent.itemsize(), reduce_function(extent.dtype, extent.combine), lowers ? extent.divisor : 1});
    for (std::size_t i = 0; i < operands.size(); ++i) {
      if (ended(i)) throw std::invalid_argument("a step combines blocks of different lengths");
      Run& run = operands[i][at[i]];
      if (run.extent->dtype != extent.dtype) throw std::invalid_argument("a step combines elements of different types");
      work.places.push_back(run.place);
      run.count -= count;
      run.place.offset += static_cast<std::size_t>(count) * run.extent->itemsize();
      if (run.count == 0) ++at[i];
    }
    action.nbytes += work.pieces.back().nbytes();
  }
  for (std::size_t i = 1; i < operands.size(); ++i)
    if (!ended(i)) throw std::invalid_argument("a step combines blocks of different lengths");
  action.pieces = work.pieces.size() - action.first_piece;
}

}  // namespace unisono
