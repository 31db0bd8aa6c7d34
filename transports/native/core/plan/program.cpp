#include "plan/program.h"

#include <algorithm>
#include <stdexcept>

#include "endpoint/channel.h"

namespace unisono {
namespace {

// The groups of a program with at most this many steps are resolved when the program is made, which takes about 100
// KiB.
constexpr std::int64_t most_resolved = 1024;

Incoming incoming_of(Opcode opcode) {
  if (opcode == Opcode::recv_reduce) return Incoming::combined;
  return opcode == Opcode::recv ? Incoming::kept : Incoming::none;
}

std::int64_t total(const std::vector<Extent>& extents) {
  std::int64_t count = 0;
  for (const Extent& extent : extents) count += extent.count;
  return count;
}

}  // namespace

Program::Program(std::shared_ptr<const Plan> plan, AllBlocks blocks, std::array<std::vector<Extent>, 2> extents,
                 std::int64_t segments, std::array<bool, 2> shared)
    : plan_(std::move(plan)), blocks_(std::move(blocks)), segments_(segments) {
  for (std::size_t kind = 0; kind < extents.size(); ++kind) {
    extents_[kind] = std::move(extents[kind]);
    if (total(extents_[kind]) < blocks_[kind].elements())
      throw std::invalid_argument("an array is shorter than its blocks");
    lay_out_strips(static_cast<BufferKind>(kind), shared[kind]);
  }
  lay_out_scratch();
  find_output_blocks_read();
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

void Program::lay_out_strips(BufferKind kind, bool shared) {
  const auto& extents = extents_[static_cast<std::size_t>(kind)];
  auto& offsets = offsets_[static_cast<std::size_t>(kind)];
  std::size_t offset = 0;
  for (const Extent& extent : extents) {
    offsets.push_back(offset);
    offset += extent.nbytes();
  }
  nbytes_[static_cast<std::size_t>(kind)] = offset;
  const Blocks& blocks = blocks_[static_cast<std::size_t>(kind)];
  const std::int64_t parts = shared ? blocks.count() : 1;
  for (std::int64_t part = 0; part < parts; ++part) {
    std::int64_t length = 0;
    for (std::size_t i = 0; i < extents.size(); ++i) {
      const Range range = split(extents[i].count, parts, part);
      add_strip(kind, i, range);
      length += range.length;
    }
    if (shared && length != blocks.at(part).length) throw std::invalid_argument("extents cannot be shared equally");
  }
}

void Program::add_strip(BufferKind kind, std::size_t extent, Range part) {
  auto& strips = strips_[static_cast<std::size_t>(kind)];
  strips.push_back({strips.empty() ? 0 : strips.back().end(), part.length, extent, part.offset});
}

template <class Each>
void Program::for_each_strip(BufferKind kind, Range range, Each visit) const {
  const auto& strips = strips_[static_cast<std::size_t>(kind)];
  const std::int64_t end = range.offset + range.length;
  auto strip = std::partition_point(strips.begin(), strips.end(),
                                    [&](const Strip& before) { return before.end() <= range.offset; });
  for (; strip != strips.end() && strip->start < end; ++strip) {
    const std::int64_t first = std::max(strip->start, range.offset);
    const Range part{first, std::min(strip->end(), end) - first};
    if (part.length > 0) visit(*strip, part);
  }
}

// If SCRATCH has counts of its own, its elements have the type of INPUT, which must then be one array. That array may
// be empty.
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
    const auto append = [&](const Strip& strip, const Range& part) {
      const Extent& extent = extents_[like][strip.extent];
      scratch.push_back({part.length, extent.dtype, extent.combine, extent.divisor});
    };
    for (std::int64_t copy = 0; copy < layout.copies; ++copy)
      for_each_strip(static_cast<BufferKind>(like), copied, append);
  }
  lay_out_strips(BufferKind::scratch, false);
}

void Program::resolve(std::size_t lane, std::int64_t group, std::int64_t segment, Work& work) const {
  work.actions.clear();
  work.pieces.clear();
  work.places.clear();
  work.incoming = Incoming::none;
  work.local_nbytes = 0;
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
  action.past_caches = stores_past_caches(step, iteration);
  action.peer = static_cast<std::int32_t>(plan_->peer(step, iteration));
  action.operands = operands.size();
  if (!operands.empty()) refine(operands, step.lower, action, work);
  if (action.nbytes != 0 || operands.empty() || step.even_if_empty) work.actions.push_back(action);
  if (!travels(action.opcode)) work.local_nbytes += action.nbytes;
  work.incoming = std::max(work.incoming, incoming_of(step.opcode));
}

// Whether a step writes to a part of a large OUTPUT that no step of this rank reads. Such a part is written past the
// caches, so that it does not displace the data that the steps read.
bool Program::stores_past_caches(const Step& step, std::int64_t iteration) const {
  if (output_blocks_read_.empty() || (step.opcode != Opcode::recv && step.opcode != Opcode::copy)) return false;
  const Operand& dst = plan_->operand(step.dst);
  if (dst.buffer != BufferKind::output) return false;
  for (std::int64_t i = 0; i < dst.count; ++i)
    if (output_blocks_read_[static_cast<std::size_t>(plan_->block(dst, iteration, i))]) return false;
  return true;
}

// Of a plan that maps memory, peers may read all of OUTPUT.
void Program::find_output_blocks_read() {
  if (nbytes(BufferKind::output) < Channel::more_than_caches_nbytes || plan_->maps()) return;
  output_blocks_read_.resize(static_cast<std::size_t>(plan_->partition(BufferKind::output).blocks));
  for (std::size_t lane = 0; lane < lanes(); ++lane)
    for (std::int64_t group = 0; group < groups(lane); ++group) {
      const GroupAt at = plan_->group_at(lane, group);
      for (const Step& step : plan_->steps(*at.group))
        for (std::int64_t i = 0; i < step.sources; ++i) mark_read(plan_->operand(step.first_source + i), at.iteration);
    }
}

void Program::mark_read(const Operand& source, std::int64_t iteration) {
  if (source.buffer != BufferKind::output) return;
  for (std::int64_t i = 0; i < source.count; ++i)
    output_blocks_read_[static_cast<std::size_t>(plan_->block(source, iteration, i))] = true;
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

// If the buffer is one block, its length may differ from this rank's, as in an allgatherv. Then it has the elements of
// the block that the step writes.
void Program::find_runs_of_peer(const Operand& operand, std::int64_t peer, std::int64_t iteration, std::int64_t segment,
                                const Operand& dst, Runs& runs) const {
  runs.clear();
  const std::size_t base = peer_base(peer, operand.buffer);
  const auto part_of = [&](const Range& block) {
    const Range part = split(block.length, segments_, segment);
    return Range{block.offset + part.offset, part.length};
  };
  if (plan_->partition(operand.buffer).blocks > 1) {
    const Blocks& blocks = blocks_[static_cast<std::size_t>(operand.buffer)];
    for (std::int64_t i = 0; i < operand.count; ++i)
      add_runs_of_peer(base, operand.buffer, part_of(blocks.at(plan_->block(operand, iteration, i))), runs);
    return;
  }
  if (dst.count != 1) throw std::invalid_argument("a peer's only block is read into one block");
  const Range block = blocks_[static_cast<std::size_t>(dst.buffer)].at(plan_->block(dst, iteration, 0));
  add_runs_of_block(base, dst.buffer, block.offset, part_of(block), runs);
}

// Appends to `runs` the part of a peer's buffer that `range` selects. The peer's buffer has the partition of this
// rank's buffer `like`, and its extents lie one after the other.
void Program::add_runs_of_peer(std::size_t base, BufferKind like, Range range, Runs& runs) const {
  const auto kind = static_cast<std::size_t>(like);
  for_each_strip(like, range, [&](const Strip& strip, const Range& part) {
    const Extent& extent = extents_[kind][strip.extent];
    const auto within = static_cast<std::size_t>(strip.offset + part.offset - strip.start);
    runs.push_back({{base, offsets_[kind][strip.extent] + within * extent.itemsize()}, part.length, &extent});
  });
}

// Appends to `runs` the part of a peer's buffer that `range` selects, where the peer's buffer holds only one block of
// this rank's buffer `like`. That block begins at element `origin`. `range` counts elements of `like`, too. The peer's
// extents are the strips of the block, one after the other.
void Program::add_runs_of_block(std::size_t base, BufferKind like, std::int64_t origin, Range range, Runs& runs) const {
  std::size_t offset = 0;  // of the strip, or of its part after `origin`
  const Range block{origin, range.offset + range.length - origin};
  for_each_strip(like, block, [&](const Strip& strip, const Range& part) {
    const Extent& extent = extents_[static_cast<std::size_t>(like)][strip.extent];
    const std::int64_t first = std::max(part.offset, range.offset);
    const std::int64_t skipped = first - part.offset;
    if (skipped < part.length)
      runs.push_back(
          {{base, offset + static_cast<std::size_t>(skipped) * extent.itemsize()}, part.length - skipped, &extent});
    offset += static_cast<std::size_t>(part.length) * extent.itemsize();
  });
}

void Program::add_runs(BufferKind kind, Range range, Runs& runs) const {
  const auto number = static_cast<std::size_t>(kind);
  const bool scratch = kind == BufferKind::scratch;
  const std::size_t first_base = kind == BufferKind::input ? 0 : extents_[0].size();
  for_each_strip(kind, range, [&](const Strip& strip, const Range& part) {
    const Extent& extent = extents_[number][strip.extent];
    const std::size_t offset = static_cast<std::size_t>(strip.offset + part.offset - strip.start) * extent.itemsize();
    const Place place = scratch ? Place{scratch_base(), offsets_[number][strip.extent] + offset}
                                : Place{first_base + strip.extent, offset};
    Run* last = runs.empty() ? nullptr : &runs.back();
    const bool joins = last != nullptr && last->place.base == place.base && last->extent->is_like(extent) &&
                       last->place.offset + static_cast<std::size_t>(last->count) * extent.itemsize() == place.offset;
    if (joins) {
      last->count += part.length;
    } else {
      runs.push_back({place, part.length, &extent});
    }
  });
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
        {count, extent.itemsize(), find_kernel(extent.dtype, extent.combine), lowers ? extent.divisor : 1});
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
