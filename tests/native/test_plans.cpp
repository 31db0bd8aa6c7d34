#include <algorithm>
#include <limits>
#include <vector>

#include "check.h"
#include "layout.h"
#include "plan.h"
#include "plan_words.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using Words = std::vector<std::int64_t>;

std::vector<Words> samples() {
  return {ring_allreduce(3, 1).encode(), direct_allreduce(4, 3).encode(), doubling_allreduce(4, 2).encode(),
          two_lane_allreduce(0).encode(), hollow_allreduce(1).encode()};
}

// Asks the plan for everything that the interpreter asks, with bounds on how much.
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

void a_plan_that_ends_early_or_late_is_refused() {
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
  for (const Blocks& blocks : {Blocks::even(17, 5), Blocks::even(2, 5), Blocks::even(0, 3), Blocks::counted(counts),
                               Blocks::copies(Blocks::even(17, 5), 3), Blocks::copies(Blocks::counted(counts), 2)}) {
    std::int64_t end = 0;
    for (std::int64_t i = 0; i < blocks.count(); ++i) {
      CHECK(blocks.at(i).offset == end && blocks.at(i).length >= 0);
      end += blocks.at(i).length;
    }
    CHECK(end == blocks.elements());
  }
  CHECK(throws<std::invalid_argument>([] { Blocks::counted({1, -1}); }));
}

// A cursor over an operand that goes round its buffer gives each element of each segment once, over several extents.
void a_cursor_meets_every_element_once() {
  PlanWords words;
  words.input_blocks = words.output_blocks = 4;
  const Plan plan(words.encode());
  const Operand operand{BufferKind::input, 3, 4, 1, 0};
  std::vector<float> memory(11);
  auto* bytes = reinterpret_cast<std::byte*>(memory.data());
  const AllExtents extents{{{{bytes, 5, DType::float32, Combine::sum},
                             {bytes + 20, 0, DType::float32, Combine::sum},
                             {bytes + 20, 6, DType::float32, Combine::sum}},
                            {},
                            {}}};
  const AllBlocks blocks{Blocks::even(11, 4), Blocks(), Blocks()};
  const Memory bound{&plan, &blocks, &extents, 3};
  for (std::int64_t segment = 0; segment < 3; ++segment) {
    std::size_t nbytes = 0;
    Cursor cursor(bound, operand, 0, segment);
    CHECK(cursor.nbytes() % sizeof(float) == 0);
    const std::size_t promised = cursor.nbytes();
    while (!cursor.at_end()) {
      const Piece piece = cursor.piece();
      *reinterpret_cast<float*>(piece.data) += 1;
      cursor.advance(1);
      nbytes += sizeof(float);
    }
    CHECK(nbytes == promised);
  }
  CHECK(std::all_of(memory.begin(), memory.end(), [](float value) { return value == 1; }));
}

}  // namespace

int main() {
  return run_tests({
      {"hand-written plans decode", hand_written_plans_decode},
      {"a plan that ends early or late is refused", a_plan_that_ends_early_or_late_is_refused},
      {"lanes of too many groups are refused", lanes_of_too_many_groups_are_refused},
      {"mutated plans are walked or refused", mutated_plans_are_walked_or_refused},
      {"blocks cover their buffer without gaps", blocks_cover_their_buffer_without_gaps},
      {"a cursor meets every element once", a_cursor_meets_every_element_once},
  });
}
