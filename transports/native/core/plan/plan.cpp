#include "plan/plan.h"

#include <stdexcept>
#include <string>

namespace unisono {
namespace {

constexpr std::int64_t format_version = 4;
// Bounds that keep every index computation far from overflow.
constexpr std::int64_t most_rows = std::int64_t{1} << 28;
constexpr std::int64_t most_times = std::int64_t{1} << 31;

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(std::string("invalid plan: ") + what);
}

// Python's part and the native core of one installation write and read the same version.
void require_version(std::int64_t version) {
  if (version == format_version) return;
  throw std::invalid_argument("invalid plan: this native core reads plans of version " +
                              std::to_string(format_version) +
                              ", and the Python part of Unisono has made one of version " + std::to_string(version) +
                              "; install Unisono again, so that both are of the same version");
}

class Reader {
 public:
  explicit Reader(std::span<const std::int64_t> words) : words_(words) {}

  std::int64_t next() {
    require(position_ < words_.size(), "it ends too early");
    return words_[position_++];
  }
  std::int64_t next_in(std::int64_t low, std::int64_t high, const char* what) {
    const std::int64_t value = next();
    require(low <= value && value <= high, what);
    return value;
  }
  std::int64_t next_count(const char* what) { return next_in(0, most_rows, what); }
  bool at_end() const { return position_ == words_.size(); }

 private:
  std::span<const std::int64_t> words_;
  std::size_t position_ = 0;
};

Partition read_partition(Reader& reader) {
  Partition partition;
  partition.blocks = reader.next_count("number of blocks");
  partition.counts = reader.next_in(0, 3, "kind of counts");
  partition.parts = reader.next_in(1, std::max<std::int64_t>(partition.blocks, 1), "parts of a share");
  require(partition.blocks % partition.parts == 0, "shares do not have their number of parts");
  return partition;
}

Step read_step(Reader& reader) {
  Step step;
  step.opcode = static_cast<Opcode>(reader.next_in(0, 9, "operation of a step"));
  const std::int64_t flags = reader.next_in(0, 7, "flags of a step");
  step.received_first = (flags & 1) != 0;
  step.lower = (flags & 2) != 0;
  step.even_if_empty = (flags & 4) != 0;
  step.peer = reader.next_in(-1, most_rows, "peer of a step");
  step.peer_advance = reader.next_in(-most_rows, most_rows, "advance of a peer");
  step.dst = reader.next();
  step.first_source = reader.next();
  step.sources = reader.next();
  return step;
}

Operand read_operand(Reader& reader) {
  Operand operand;
  operand.peer = reader.next_in(-1, most_rows, "peer of an operand");
  operand.buffer = static_cast<BufferKind>(reader.next_in(0, 2, "buffer"));
  operand.start = reader.next_in(-most_rows, most_rows, "start of a span");
  operand.count = reader.next_count("length of a span");
  operand.stride = reader.next_in(-most_rows, most_rows, "stride of a span");
  operand.advance = reader.next_in(-most_rows, most_rows, "advance of a span");
  return operand;
}

bool in_range(std::int64_t first, std::int64_t count, std::size_t total) {
  const auto limit = static_cast<std::int64_t>(total);
  return 0 <= first && 0 <= count && first <= limit && count <= limit - first;
}

}  // namespace

Plan::Plan(std::span<const std::int64_t> words) {
  Reader reader(words);
  require_version(reader.next());
  size_ = reader.next_in(1, most_rows, "number of ranks");
  rank_ = reader.next_in(0, size_ - 1, "rank");
  const std::int64_t lanes = reader.next_in(0, 64, "number of lanes");
  const std::int64_t items = reader.next_count("number of items");
  const std::int64_t groups = reader.next_count("number of groups");
  const std::int64_t dependencies = reader.next_count("number of dependencies");
  const std::int64_t steps = reader.next_count("number of steps");
  const std::int64_t operands = reader.next_count("number of operands");
  const std::int64_t permutation = reader.next_count("length of the permutation");
  partitions_[0] = read_partition(reader);
  partitions_[1] = read_partition(reader);
  partitions_[2] = read_partition(reader);
  scratch_.like = reader.next_in(-1, 1, "scratch must be like input or output");
  scratch_.copies = reader.next_count("number of scratch copies");
  scratch_.block = reader.next_in(-1, most_rows, "block that scratch is like");

  for (std::int64_t i = 0; i < lanes; ++i) {
    const std::int64_t first = reader.next();
    lanes_.push_back({first, reader.next(), 0});
  }
  for (std::int64_t i = 0; i < items; ++i) {
    const std::int64_t times = reader.next_in(0, most_times, "times of a repeat");
    const std::int64_t first = reader.next();
    items_.push_back({times, first, reader.next()});
  }
  for (std::int64_t i = 0; i < groups; ++i) {
    Group group{};
    group.first_step = reader.next();
    group.steps = reader.next();
    group.first_dependency = reader.next();
    group.dependencies = reader.next();
    groups_.push_back(group);
  }
  for (std::int64_t i = 0; i < dependencies; ++i) {
    const std::int64_t lane = reader.next();
    dependencies_.push_back({lane, reader.next()});
  }
  for (std::int64_t i = 0; i < steps; ++i) {
    steps_.push_back(read_step(reader));
    maps_ |= steps_.back().opcode >= Opcode::read;
  }
  for (std::int64_t i = 0; i < operands; ++i) operands_.push_back(read_operand(reader));
  for (std::int64_t i = 0; i < permutation; ++i)
    permutation_.push_back(reader.next_in(0, permutation - 1, "entry of the permutation"));
  require(reader.at_end(), "it has words left over");

  for (Lane& lane : lanes_) {
    require(in_range(lane.first_item, lane.items, items_.size()), "items of a lane");
    for (const Item& item : slice(items_, lane.first_item, lane.items)) {
      require(in_range(item.first_group, item.groups, groups_.size()), "groups of an item");
      lane.groups_as_run += item.times * item.groups;
      require(lane.groups_as_run <= most_times, "groups of a lane as run");
    }
  }
  check();
}

void Plan::check() const {
  check_scratch();
  for (const Group& group : groups_) {
    require(in_range(group.first_step, group.steps, steps_.size()), "steps of a group");
    require(in_range(group.first_dependency, group.dependencies, dependencies_.size()), "dependencies of a group");
  }
  for (const Dependency& dependency : dependencies_) {
    require(in_range(dependency.lane, 1, lanes_.size()), "lane of a dependency");
    const Lane& lane = lanes_[static_cast<std::size_t>(dependency.lane)];
    require(0 <= dependency.group && dependency.group < lane.groups_as_run, "group of a dependency");
  }
  for (const Step& step : steps_) check_step(step);
  for (const Operand& operand : operands_) check_operand(operand);
}

void Plan::check_scratch() const {
  const Partition& scratch = partition(BufferKind::scratch);
  require(scratch.parts == 1, "scratch is cut into parts");
  if (scratch_.like < 0) {
    require(scratch.blocks == 0 || scratch.counts != 0, "scratch has no counts");
    require(scratch_.copies == 1 && scratch_.block == -1, "copies of scratch by counts of its own");
    return;
  }
  const std::int64_t blocks = partitions_[static_cast<std::size_t>(scratch_.like)].blocks;
  require(scratch_.block < blocks, "block that scratch is like");
  const std::int64_t copied = scratch_.block < 0 ? blocks : 1;
  require(scratch.blocks == copied * scratch_.copies, "scratch does not have the blocks of its copies");
}

// The fields that steps of each kind have.
struct Plan::Shape {
  bool peer;
  bool dst;
  std::int64_t fewest_sources;
  std::int64_t most_sources;
  bool remote;  // whether sources may lie in a peer's memory
};

const Plan::Shape& Plan::shape_of(Opcode opcode) {
  constexpr std::int64_t any = most_rows;
  static constexpr Shape shapes[] = {
      {true, false, 1, 1, false},    // send
      {true, true, 0, 0, false},     // recv
      {true, true, 1, 1, false},     // recv_reduce
      {false, true, 1, 1, false},    // copy
      {false, true, 1, any, false},  // reduce
      {true, true, 1, 1, true},      // read
      {false, true, 1, any, true},   // read_reduce
      {true, true, 1, 1, true},      // write
      {true, false, 0, 0, false},    // signal
      {true, false, 0, 0, false},    // wait
  };
  return shapes[static_cast<std::size_t>(opcode)];
}

void Plan::check_step(const Step& step) const {
  const Shape& shape = shape_of(step.opcode);
  require(step.opcode != Opcode::write, "peers' memory can only be read here");
  require(!shape.peer || (0 <= step.peer && step.peer < size_), "peer of a step");
  require(shape.dst ? in_range(step.dst, 1, operands_.size()) : step.dst == -1, "destination of a step");
  require(!shape.dst || (operand(step.dst).buffer != BufferKind::input && operand(step.dst).peer < 0),
          "a step writes INPUT or memory of a peer");
  require(in_range(step.first_source, step.sources, operands_.size()), "sources of a step");
  require(shape.fewest_sources <= step.sources && step.sources <= shape.most_sources, "number of sources of a step");
  for (const Operand& source : slice(operands_, step.first_source, step.sources))
    require(source.peer < 0 || shape.remote, "a step has a source in memory of a peer");
}

// The check assumes that a peer's buffer has the partition of this rank's buffer, or is one block if this rank has no
// such buffer.
void Plan::check_operand(const Operand& operand) const {
  require(operand.peer < size_, "peer of an operand");
  const std::int64_t blocks = partition(operand.buffer).blocks;
  if (operand.peer >= 0 && blocks == 0) {
    require(operand.start == 0 && operand.count == 1 && operand.advance == 0, "a span of a peer's only block");
    return;
  }
  require(operand.count <= blocks, "a span is longer than its buffer");
  require(operand.count == 0 || blocks > 0, "a span of a buffer without blocks");
}

GroupAt Plan::group_at(std::size_t lane, std::int64_t group) const {
  for (const Item& item : slice(items_, lanes_[lane].first_item, lanes_[lane].items)) {
    const std::int64_t as_run = item.times * item.groups;
    if (group < as_run) {
      const std::int64_t row = item.first_group + group % item.groups;
      return {&groups_[static_cast<std::size_t>(row)], group / item.groups};
    }
    group -= as_run;
  }
  throw std::out_of_range("group of a lane");
}

}  // namespace unisono
