// Plans: any words are refused, or give a program that stays within the memory of its call.
#include <algorithm>
#include <vector>

#include "fuzz.h"
#include "plan/program.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

// Python passes plans with few blocks and groups. These bounds also keep a run short.
constexpr std::int64_t most_blocks = 256;
constexpr std::int64_t most_groups = 64;

Blocks blocks_of(const Partition& partition, Input& input) {
  if (partition.counts == 0)
    return Blocks::in_parts(Blocks::even(input.take<std::uint8_t>(), partition.shares()), partition.parts);
  std::vector<std::int64_t> counts;
  for (std::int64_t i = 0; i < partition.shares(); ++i) counts.push_back(input.take<std::int8_t>());
  return Blocks::in_parts(Blocks::counted(counts), partition.parts);
}

std::vector<Extent> extents_of(std::int64_t elements, Input& input) {
  const auto dtype = static_cast<DType>(input.take<std::uint8_t>() % dtype_count);
  const std::int64_t first = std::min<std::int64_t>(elements, input.take<std::uint8_t>());
  return {{first, dtype, Combine::sum, 3}, {elements - first, DType::float32, Combine::max}};
}

void check_places(const Program& program, const Work& work) {
  for (const Action& action : work.actions) {
    CHECK(action.opcode > Opcode::recv_reduce || (0 <= action.peer && action.peer < program.plan().size()));
    for (std::size_t i = 0; i < action.pieces; ++i) {
      for (std::size_t k = 0; k < action.operands; ++k) {
        const Place& place = work.places_of(action, i)[k];
        const std::size_t inputs = program.extents(BufferKind::input).size();
        CHECK(place.base <= program.scratch_base());
        const std::size_t room = place.base == program.scratch_base() ? program.scratch_nbytes()
                                 : place.base < inputs
                                     ? program.extents(BufferKind::input)[place.base].nbytes()
                                     : program.extents(BufferKind::output)[place.base - inputs].nbytes();
        CHECK(place.offset <= room && work.piece(action, i).nbytes() <= room - place.offset);
      }
    }
  }
}

void check_program(std::span<const std::int64_t> words, Input& input) {
  auto plan = std::make_shared<const Plan>(words);
  AllBlocks blocks;
  for (std::size_t kind = 0; kind < buffer_kinds; ++kind)
    if (plan->partition(static_cast<BufferKind>(kind)).blocks > most_blocks) return;
  for (std::size_t kind = 0; kind < 2; ++kind)
    blocks[kind] = blocks_of(plan->partition(static_cast<BufferKind>(kind)), input);
  blocks[2] = plan->scratch().like < 0 ? blocks_of(plan->partition(BufferKind::scratch), input)
                                       : scratch_blocks(plan->scratch(), blocks);
  std::array<std::vector<Extent>, 2> extents;
  for (std::size_t kind = 0; kind < 2; ++kind) extents[kind] = extents_of(blocks[kind].elements(), input);
  const std::int64_t segments = 1 + input.take<std::uint8_t>() % 4;
  const Program program(std::move(plan), std::move(blocks), std::move(extents), segments);
  Work room;
  for (std::size_t lane = 0; lane < program.lanes(); ++lane)
    for (std::int64_t group = 0; group < std::min(program.groups(lane), most_groups); ++group)
      for (std::int64_t segment = 0; segment < segments; ++segment)
        check_places(program, program.work(lane, group, segment, room));
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  Input input(data, nbytes);
  const auto count = input.take<std::uint16_t>();
  std::vector<std::int64_t> words;
  for (std::size_t i = 0; i < count && !input.empty(); ++i) words.push_back(input.take<std::int64_t>());
  try {
    check_program(words, input);
  } catch (const std::invalid_argument&) {
    // refused
  }
  return 0;
}
