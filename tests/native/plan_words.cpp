#include "plan_words.h"

#include <algorithm>

namespace unisono::testing {
namespace {

using Words = std::vector<std::int64_t>;

void append(Words& words, std::initializer_list<std::int64_t> more) { words.insert(words.end(), more); }

struct Tables {
  Words lanes, items, groups, dependencies, steps, operands;

  std::int64_t add(const Operand& operand) {
    append(operands, {operand.peer, static_cast<std::int64_t>(operand.buffer), operand.start, operand.count,
                      operand.stride, operand.advance});
    return static_cast<std::int64_t>(operands.size() / 6) - 1;
  }
  void add(const StepWords& step) {
    const std::int64_t dst = step.dst ? add(*step.dst) : -1;
    const auto first_source = static_cast<std::int64_t>(operands.size() / 6);
    for (const Operand& source : step.sources) add(source);
    append(steps, {static_cast<std::int64_t>(step.opcode), step.flags, step.peer, step.peer_advance, dst, first_source,
                   static_cast<std::int64_t>(step.sources.size())});
  }
  void add(const GroupWords& group) {
    append(groups, {static_cast<std::int64_t>(steps.size() / 7), static_cast<std::int64_t>(group.steps.size()),
                    static_cast<std::int64_t>(dependencies.size() / 2), static_cast<std::int64_t>(group.after.size())});
    for (const Dependency& needed : group.after) append(dependencies, {needed.lane, needed.group});
    for (const StepWords& step : group.steps) add(step);
  }
  void add(const ItemWords& item) {
    append(items,
           {item.times, static_cast<std::int64_t>(groups.size() / 4), static_cast<std::int64_t>(item.groups.size())});
    for (const GroupWords& group : item.groups) add(group);
  }
};

StepWords send(std::int64_t peer, const Operand& source) { return {Opcode::send, peer, 0, {}, {source}}; }
StepWords recv(std::int64_t peer, const Operand& dst) { return {Opcode::recv, peer, 0, dst, {}}; }
StepWords recv_reduce(std::int64_t peer, const Operand& dst, const Operand& source, std::int64_t flags = 0) {
  return {Opcode::recv_reduce, peer, 0, dst, {source}, flags};
}

// The exchange of one block between two ranks.
GroupWords exchange(std::int64_t peer, std::int64_t block) {
  const std::int64_t order = peer == 0 ? received_first : 0;
  return {{send(peer, input(block, 1)), recv_reduce(peer, output(block, 1), input(block, 1), order | lower)}, {}};
}

}  // namespace

Operand input(std::int64_t start, std::int64_t count, std::int64_t advance) {
  return {BufferKind::input, start, count, 1, advance};
}
Operand output(std::int64_t start, std::int64_t count, std::int64_t advance) {
  return {BufferKind::output, start, count, 1, advance};
}
Operand scratch(std::int64_t start, std::int64_t count) { return {BufferKind::scratch, start, count, 1, 0}; }

std::vector<std::int64_t> PlanWords::encode() const {
  Tables tables;
  for (const auto& lane : lanes) {
    append(tables.lanes, {static_cast<std::int64_t>(tables.items.size() / 3), static_cast<std::int64_t>(lane.size())});
    for (const ItemWords& item : lane) tables.add(item);
  }
  const auto rows = [](const Words& table, std::size_t width) {
    return static_cast<std::int64_t>(table.size() / width);
  };
  Words words{4,
              size,
              rank,
              rows(tables.lanes, 2),
              rows(tables.items, 3),
              rows(tables.groups, 4),
              rows(tables.dependencies, 2),
              rows(tables.steps, 7),
              rows(tables.operands, 6),
              0,
              input_blocks,
              0,
              1,
              output_blocks,
              0,
              1,
              input_blocks * scratch_copies,
              0,
              1,
              0,
              scratch_copies,
              -1};
  for (const Words* table :
       {&tables.lanes, &tables.items, &tables.groups, &tables.dependencies, &tables.steps, &tables.operands})
    words.insert(words.end(), table->begin(), table->end());
  return words;
}

PlanWords ring_allreduce(std::int64_t size, std::int64_t rank) {
  const std::int64_t next = (rank + 1) % size;
  const std::int64_t before = (rank + size - 1) % size;
  const GroupWords copy{{{Opcode::copy, 0, 0, output(0, size), {input(0, size)}}}, {}};
  const GroupWords scatter{
      {send(next, output(rank, 1, -1)), recv_reduce(before, output(rank - 1, 1, -1), output(rank - 1, 1, -1))}, {}};
  GroupWords last = scatter;  // completes the sums
  for (Operand* operand : {&last.steps[0].sources[0], &*last.steps[1].dst, &last.steps[1].sources[0]})
    operand->start -= size - 2;
  last.steps[1].flags = lower;
  const GroupWords gather{{send(next, output(rank + 1, 1, -1)), recv(before, output(rank, 1, -1))}, {}};
  return {size, rank, size, size, 0, {{{1, {copy}}, {size - 2, {scatter}}, {1, {last}}, {size - 1, {gather}}}}};
}

PlanWords direct_allreduce(std::int64_t size, std::int64_t rank) {
  GroupWords messages;
  StepWords sum{Opcode::reduce, 0, 0, output(0, 1), {}, lower};
  for (std::int64_t peer = 0, place = 0; peer < size; ++peer) {
    if (peer == rank) {
      sum.sources.push_back(input(0, 1));
      continue;
    }
    messages.steps.push_back(send(peer, input(0, 1)));
    messages.steps.push_back(recv(peer, scratch(place, 1)));
    sum.sources.push_back(scratch(place++, 1));
  }
  return {size, rank, 1, 1, size - 1, {{{1, {messages}}, {1, {{{sum}, {}}}}}}};
}

PlanWords doubling_allreduce(std::int64_t size, std::int64_t rank) {
  if (size == 2) return {2, rank, 1, 1, 0, {{{1, {exchange(1 - rank, 0)}}}}};
  const GroupWords near{{send(rank ^ 1, input(0, 1)), recv_reduce(rank ^ 1, scratch(0, 1), input(0, 1))}, {}};
  const GroupWords far{{send(rank ^ 2, scratch(0, 1)), recv_reduce(rank ^ 2, output(0, 1), scratch(0, 1), lower)}, {}};
  return {4, rank, 1, 1, 1, {{{1, {near}}, {1, {far}}}}};
}

PlanWords two_lane_allreduce(std::int64_t rank) {
  GroupWords second = exchange(1 - rank, 1);
  second.after = {{0, 0}};
  return {2, rank, 2, 2, 0, {{{1, {exchange(1 - rank, 0)}}}, {{1, {second}}}}};
}

PlanWords empty_groups_allreduce(std::int64_t rank) {
  const ItemWords empty{3, {GroupWords{}, GroupWords{}}};
  const ItemWords never{0, {exchange(1 - rank, 0)}};
  return {2, rank, 1, 1, 0, {{empty, never, {1, {exchange(1 - rank, 0)}}, empty}, {}}};
}

}  // namespace unisono::testing
