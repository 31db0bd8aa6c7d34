#include <algorithm>
#include <limits>
#include <vector>

#include "check.h"
#include "plan/layout.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "plan_words.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using Words = std::vector<std::int64_t>;

std::vector<Words> samples() {
  return {ring_allreduce(3, 1).encode(), direct_allreduce(4, 3).encode(), doubling_allreduce(4, 2).encode(),
          two_lane_allreduce(0).encode(), empty_groups_allreduce(1).encode()};
}

// Calls every method of a plan that a run calls, for a few groups and blocks.
void walk(const Plan& plan) {
  for (std::size_t lane = 0; lane < plan.lanes().size(); ++lane) {
    const std::int64_t groups = plan.lanes()[lane].groups_as_run;
    CHECK(groups >= 0);
    for (const std::int64_t group : {std::int64_t{0}, std::int64_t{1}, groups / 2, groups - 1}) {
      if (group < 0 || group >= groups) continue;
      const GroupAt at = plan.group_at(lane, group);
      for (const Dependency& needed : plan.dependencies(*at.group))
        CHECK(static_cast<std::size_t>(needed.lane) < plan.lanes().size());
      for (const Step& step : plan.steps(*at.group)) {
        if (step.opcode <= Opcode::recv_reduce) {
          const std::int64_t peer = plan.peer(step, at.iteration);
          CHECK(0 <= peer && peer < plan.size());
        }
        for (std::int64_t i = 0; i < step.sources; ++i) {
          const Operand& operand = plan.operand(step.first_source + i);
          for (std::int64_t k = 0; k < std::min<std::int64_t>(operand.count, 4); ++k) {
            const std::int64_t block = plan.block(operand, at.iteration, k);
            CHECK(0 <= block && block < plan.partition(operand.buffer).blocks);
          }
        }
      }
    }
  }
}

void hand_written_plans_decode() {
  for (const Words& words : samples()) walk(Plan(words));
  const Plan ring(ring_allreduce(5, 2).encode());
  CHECK(ring.size() == 5 && ring.rank() == 2 && ring.lanes().size() == 1 && ring.lanes()[0].groups_as_run == 1 + 4 + 4);
}

void a_plan_that_is_too_short_or_too_long_is_refused() {
  for (const Words& words : samples()) {
    for (std::size_t length = 0; length < words.size(); ++length)
      CHECK(throws<std::invalid_argument>([&] { Plan(std::span(words).first(length)); }));
    Words longer = words;
    longer.push_back(0);
    CHECK(throws<std::invalid_argument>([&] { Plan{longer}; }));
  }
}

void lanes_of_too_many_groups_are_refused() {
  PlanWords plan;
  plan.lanes = {{{std::int64_t{1} << 31, {GroupWords{}, GroupWords{}}}}};
  CHECK(throws<std::invalid_argument>([&] { Plan(plan.encode()); }));
  plan.lanes = {{{std::int64_t{1} << 31, {GroupWords{}}}}};
  CHECK(Plan(plan.encode()).lanes()[0].groups_as_run == std::int64_t{1} << 31);
}

void mutated_plans_are_walked_or_refused() {
  Dice dice(2);
  std::size_t accepted = 0;
  for (int round = 0; round < 10000; ++round) {
    Words words = samples()[dice.below(5)];
    for (std::size_t i = dice.below(4); i > 0; --i)
      words[dice.below(words.size())] = static_cast<std::int64_t>(dice.awkward());
    try {
      walk(Plan(words));
      ++accepted;
    } catch (const std::invalid_argument&) {
    }
  }
  CHECK(accepted > 100 && accepted < 9900);
}

void blocks_cover_their_buffer_without_gaps() {
  const std::vector<std::int64_t> counts{3, 0, 5};
  for (const Blocks& blocks :
       {Blocks::even(17, 5), Blocks::even(2, 5), Blocks::even(0, 3), Blocks::counted(counts),
        Blocks::copies(Blocks::even(17, 5), 3), Blocks::copies(Blocks::counted(counts), 2),
        Blocks::in_parts(Blocks::even(17, 5), 2), Blocks::in_parts(Blocks::counted(counts), 4)}) {
    std::int64_t end = 0;
    for (std::int64_t i = 0; i < blocks.count(); ++i) {
      CHECK(blocks.at(i).offset == end && blocks.at(i).length >= 0);
      end += blocks.at(i).length;
    }
    CHECK(end == blocks.elements());
  }
  CHECK(throws<std::invalid_argument>([] { Blocks::counted({1, -1}); }));
  // Shares of 4, 4 and 3 elements, each cut into two parts.
  const Blocks parts = Blocks::in_parts(Blocks::even(11, 3), 2);
  CHECK(parts.count() == 6 && parts.at(4).offset == 8 && parts.at(4).length == 2 && parts.at(5).length == 1);
}

// A step whose operands wrap around their buffers, one of them with three extents. It must reach each element of each
// segment exactly once.
void a_program_covers_every_element_once() {
  PlanWords words;
  words.input_blocks = words.output_blocks = 4;
  const Operand to{BufferKind::output, 3, 4, 1, 0};
  const Operand from{BufferKind::input, 3, 4, 1, 0};
  words.lanes = {{{1, {{{{Opcode::copy, 0, 0, to, {from}}}, {}}}}}};
  const std::vector<Extent> one{{11, DType::float32, Combine::sum}};
  const std::vector<Extent> three{
      {5, DType::float32, Combine::sum}, {0, DType::float32, Combine::sum}, {6, DType::float32, Combine::sum}};
  const AllBlocks blocks{Blocks::even(11, 4), Blocks::even(11, 4), Blocks()};
  const Program program(std::make_shared<const Plan>(words.encode()), blocks, {one, three}, 3);
  std::array<int, 11> times_covered{};
  for (std::int64_t segment = 0; segment < 3; ++segment) {
    Work room;
    const Work& work = program.work(0, 0, segment, room);
    for (const Action& action : work.actions) {
      std::size_t nbytes = 0;
      for (std::size_t i = 0; i < action.pieces; ++i) {
        const Place* places = work.places_of(action, i);
        const std::size_t first = places[0].offset / 4 + (places[0].base == 3 ? 5 : 0);
        CHECK(places[0].base != 2 && places[1].base == 0 && places[1].offset == first * 4);
        for (std::int64_t k = 0; k < work.piece(action, i).count; ++k)
          ++times_covered.at(first + static_cast<std::size_t>(k));
        nbytes += work.piece(action, i).nbytes();
      }
      CHECK(nbytes == action.nbytes);
    }
  }
  CHECK(std::all_of(times_covered.begin(), times_covered.end(), [](int times) { return times == 1; }));
}

void a_program_refuses_arrays_and_steps_that_do_not_fit() {
  PlanWords words;
  words.input_blocks = 2;
  words.output_blocks = 1;
  words.lanes = {
      {{1,
        {{{{Opcode::copy, 0, 0, Operand{BufferKind::output, 0, 1, 1, 0}, {{BufferKind::input, 0, 1, 1, 0}}}}, {}}}}}};
  const auto plan = std::make_shared<const Plan>(words.encode());
  const std::vector<Extent> extent{{8, DType::float32, Combine::sum}};
  const auto make = [&](std::int64_t in, std::int64_t out, DType dtype = DType::float32) {
    const AllBlocks blocks{Blocks::even(in, 2), Blocks::even(out, 1), Blocks()};
    return Program(plan, blocks, {extent, {{8, dtype, Combine::sum}}}, 1);
  };
  make(8, 4);
  CHECK(throws<std::invalid_argument>([&] { make(8, 4, DType::float64); }));
  CHECK(throws<std::invalid_argument>([&] { make(8, 8); }));  // of different lengths
  CHECK(throws<std::invalid_argument>([&] { make(8, 3); }));
  CHECK(throws<std::invalid_argument>([&] { make(18, 9); }));  // longer than the arrays
}

}  // namespace

int main() {
  return run_tests({
      {"hand-written plans decode", hand_written_plans_decode},
      {"a plan that is too short or too long is refused", a_plan_that_is_too_short_or_too_long_is_refused},
      {"lanes of too many groups are refused", lanes_of_too_many_groups_are_refused},
      {"mutated plans are walked or refused", mutated_plans_are_walked_or_refused},
      {"blocks cover their buffer without gaps", blocks_cover_their_buffer_without_gaps},
      {"a program covers every element once", a_program_covers_every_element_once},
      {"a program refuses arrays and steps that do not fit", a_program_refuses_arrays_and_steps_that_do_not_fit},
  });
}
