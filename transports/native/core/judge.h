// A judge finds out why a call does not go on: it asks all ranks what they know of the call, and compares their
// answers.
//
// Theory of operation. The two lowest ranks that have not left the job are its judges: the first is the hub, the second
// stands in for it. Every rank has a control link to both. A rank reports to them, and to the hub alone that a call is
// blocked:
//
// - blocked: the call has not moved for a while. The judge asks all ranks once. If their digests of the call differ,
//   they disagree on it, and the judge has a failure for everybody.
// - mismatch: a message of another call has arrived. The same, and the reported mismatch is the failure if the ranks
//   agree.
// - late: the call will time out soon. The judge asks all ranks again and again, and sends the late rank an outlook:
// what
//   the others are doing, and who does not answer. At its deadline the late rank raises its latest outlook, and waits
//   for nobody. A judge that is stopped sends none, and then the outlook of the other judge counts.
// - closing: a rank closes a communicator, and its last call may have ended before other ranks made theirs. The judge
//   tells it once all have made the call, or have left. If they disagree, there is a failure for everybody.
//
// Sequence -1 stands for messages: the judge then asks where the ranks are, and follows who waits for whom.
//
// No links and no clock: frames go out by a function, and every call says what time it is.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "diagnosis.h"
#include "frame.h"

namespace unisono {

class Judge {
 public:
  using Clock = std::chrono::steady_clock;
  using Send = std::function<void(std::int32_t rank, const Frame& frame)>;

  Judge(std::int32_t size, Send send) : size_(size), send_(std::move(send)) {}

  // Takes a report of type blocked, mismatch, late or closing.
  void take_report(std::int32_t reporter, const Frame& report, Clock::time_point now);
  // Takes the answer of a rank to a query.
  void take_answer(std::int32_t from, const Frame& answer);
  void note_departure(std::int32_t rank, const std::string& farewell);
  // Asks again, and decides, where it is time to.
  void tick(Clock::time_point now);
  // When `tick` has something to do; the maximum if it has nothing.
  Clock::time_point next_tick() const;
  // Hands out the failure that has been found, if any.
  std::optional<Failure> take_failure() { return std::exchange(failure_, std::nullopt); }

 private:
  using Key = std::pair<std::uint64_t, std::int64_t>;  // communicator and sequence
  struct LateRank {
    std::int32_t rank;
    std::int64_t number;     // of the call or message, as the rank counts
    std::int32_t waits_for;  // of a message
  };
  // The last call that a rank has made on a communicator that it has closed.
  struct LastCall {
    std::int32_t rank;
    std::uint64_t communicator;
    std::int64_t sequence;
    std::uint64_t digest;
    std::string text;
  };
  struct Question {
    Diagnosis diagnosis;
    std::int32_t round = 0;  // tells answers to this question from answers to an earlier one
    std::vector<LateRank> late;
    std::vector<std::int32_t> closing;
    std::chrono::microseconds period{};  // between two rounds
    Clock::time_point next_round = Clock::time_point::max();
    Clock::time_point decides_at{};  // without the ranks that have not answered by then
    Clock::time_point expires{};
  };

  Question& question_of(const Frame& report, Clock::time_point now);
  void add_late(Question& question, std::int32_t reporter, const Frame& report, Clock::time_point now);
  void add_closing(Question& question, std::int32_t reporter, const Frame& report, Clock::time_point now);
  void repeat_within(Question& question, std::chrono::microseconds time, Clock::time_point now);
  void ask(Question& question, std::int32_t rank);
  void ask_all(Question& question, Clock::time_point now);
  void decide(Question& question, bool final);
  void send_outlooks(const Question& question);
  void settle(Question& question);
  RankReport departed(std::int32_t rank, const Key& call) const;

  const std::int32_t size_;
  const Send send_;
  std::map<Key, Question> questions_;
  std::map<std::int32_t, std::string> farewells_;  // of ranks that have left
  std::deque<LastCall> last_calls_;
  std::int32_t rounds_ = 0;
  std::optional<Failure> failure_;
};

}  // namespace unisono
