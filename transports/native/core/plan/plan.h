// `Plan`: the decoded and checked form of the int64 array that unisono.algorithms.ir.encode writes. It knows no
// algorithm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace unisono {

//! The buffers of a plan.
enum class BufferKind : std::uint8_t { input, output, scratch };
inline constexpr std::size_t buffer_kinds = 3;

//! The kinds of steps, numbered as in encode.
enum class Opcode : std::uint8_t { send, recv, recv_reduce, copy, reduce, read, read_reduce, write, signal, wait };

//! Whether a step sends or receives a message or a flag. A flag travels as a message.
constexpr bool travels(Opcode opcode) { return opcode <= Opcode::recv_reduce || opcode >= Opcode::signal; }
//! Whether a step sends its message or flag. If not, the step receives it.
constexpr bool is_sent(Opcode opcode) { return opcode == Opcode::send || opcode == Opcode::signal; }

//! The block lengths of a buffer: nearly equal shares or counts, each cut into nearly equal parts.
struct Partition {
  std::int64_t blocks = 0;
  std::int64_t counts = 0;  // 0: equal shares; otherwise which of the caller's lists of counts
  std::int64_t parts = 1;   // blocks of a share; a block is a share unless the plan says more

  std::int64_t shares() const { return blocks / parts; }
};

//! The partition of SCRATCH into blocks: by counts of its own, or like that of another buffer or of one of its blocks,
//! several times.
struct ScratchLayout {
  std::int64_t like = -1;  // the other buffer; -1: counts of its own
  std::int64_t copies = 1;
  std::int64_t block = -1;  // index in memory of the copied block; -1: all blocks
};

//! A span of blocks in a buffer, in this rank's memory or a peer's.
struct Operand {
  BufferKind buffer = BufferKind::input;
  std::int64_t start = 0;
  std::int64_t count = 0;
  std::int64_t stride = 0;
  std::int64_t advance = 0;
  std::int64_t peer = -1;  // owner of the memory; -1: this rank
};

//! One action of a group.
struct Step {
  Opcode opcode = Opcode::copy;
  bool received_first = false;
  bool lower = false;
  bool even_if_empty = false;  // whether a message without bytes is sent and received
  std::int64_t peer = 0;
  std::int64_t peer_advance = 0;
  std::int64_t dst = -1;  // index of an operand; -1: none
  std::int64_t first_source = 0;
  std::int64_t sources = 0;
};

//! A group of another lane that must have ended.
struct Dependency {
  std::int64_t lane;
  std::int64_t group;
};

//! A group: the ranges of its steps and of its dependencies in the tables of the plan.
struct Group {
  std::int64_t first_step;
  std::int64_t steps;
  std::int64_t first_dependency;
  std::int64_t dependencies;
};

//! A group that is run once, or several groups that are repeated.
struct Item {
  std::int64_t times;
  std::int64_t first_group;
  std::int64_t groups;
};

//! A sequence of items.
struct Lane {
  std::int64_t first_item;
  std::int64_t items;
  std::int64_t groups_as_run;
};

//! One execution of a group: the group, and the iteration of the Repeat that contains it.
struct GroupAt {
  const Group* group;
  std::int64_t iteration;
};

//! The plan of one rank. Immutable.
class Plan {
 public:
  //! Decodes `words`; throws std::invalid_argument if any value is out of range.
  explicit Plan(std::span<const std::int64_t> words);

  //! The number of ranks.
  std::int64_t size() const { return size_; }
  //! The rank that the plan is for.
  std::int64_t rank() const { return rank_; }
  //! The lanes.
  const std::vector<Lane>& lanes() const { return lanes_; }
  //! The partition of a buffer.
  const Partition& partition(BufferKind kind) const { return partitions_[static_cast<std::size_t>(kind)]; }
  //! The layout of SCRATCH.
  const ScratchLayout& scratch() const { return scratch_; }

  //! Whether peers read each other's memory.
  bool maps() const { return maps_; }

  //! The group with this number in a lane as run, with repeats unrolled.
  GroupAt group_at(std::size_t lane, std::int64_t group) const;
  //! The steps of a group.
  std::span<const Step> steps(const Group& group) const { return slice(steps_, group.first_step, group.steps); }
  //! The groups of other lanes that must have ended before a group begins.
  std::span<const Dependency> dependencies(const Group& group) const {
    return slice(dependencies_, group.first_dependency, group.dependencies);
  }
  //! The operand with this index.
  const Operand& operand(std::int64_t index) const { return operands_[static_cast<std::size_t>(index)]; }

  //! The peer of a step in an iteration of its Repeat.
  std::int64_t peer(const Step& step, std::int64_t iteration) const {
    return step.peer_advance == 0 ? step.peer : modulo(step.peer + iteration * step.peer_advance, size_);
  }
  //! The index in memory of the i-th block of an operand, in an iteration of its Repeat.
  std::int64_t block(const Operand& operand, std::int64_t iteration, std::int64_t i) const {
    const std::int64_t blocks = partition(operand.buffer).blocks;
    std::int64_t logical = operand.start + iteration * operand.advance + i * operand.stride;
    if (logical < 0 || logical >= blocks) logical = modulo(logical, blocks);
    const bool permuted = static_cast<std::int64_t>(permutation_.size()) == blocks;
    return permuted ? permutation_[static_cast<std::size_t>(logical)] : logical;
  }

 private:
  static std::int64_t modulo(std::int64_t value, std::int64_t divisor) {
    const std::int64_t remainder = value % divisor;
    return remainder < 0 ? remainder + divisor : remainder;
  }
  template <class T>
  static std::span<const T> slice(const std::vector<T>& rows, std::int64_t first, std::int64_t count) {
    return std::span<const T>(rows).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
  }
  struct Shape;
  static const Shape& shape_of(Opcode opcode);
  void check() const;
  void check_scratch() const;
  void check_step(const Step& step) const;
  void check_operand(const Operand& operand) const;

  std::int64_t size_ = 0;
  std::int64_t rank_ = 0;
  bool maps_ = false;
  Partition partitions_[buffer_kinds];
  ScratchLayout scratch_;
  std::vector<Lane> lanes_;
  std::vector<Item> items_;
  std::vector<Group> groups_;
  std::vector<Dependency> dependencies_;
  std::vector<Step> steps_;
  std::vector<Operand> operands_;
  std::vector<std::int64_t> permutation_;
};

}  // namespace unisono
