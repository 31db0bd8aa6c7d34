// `Judge` finds out why a call does not end: it asks all ranks about the call and compares their answers.
//
// Theory of operation
// -------------------
// The two lowest ranks that have not departed are the judges of the job: the hub, and its stand-in. Every rank has a
// control link to both. A rank sends its reports to both judges, except that it reports a blocked call to the hub only:
//
// - blocked: the call has made no progress for a while. The judge asks all ranks once. If their digests of the call
// differ, they disagree, and the judge sends every rank a failure.
// - mismatch: a message of another call has arrived. The judge asks as for a blocked call. If the ranks agree, the
// reported mismatch becomes the failure.
// - late: the call will time out soon. The judge asks all ranks again and again. It sends the late rank an outlook: the
// calls of the other ranks, and the ranks that do not answer. At its deadline the late rank raises its latest outlook
// and waits for no answer. If one judge is stopped, the outlook of the other one counts.
// - closing: a rank closes a communicator, and its last call may have ended before other ranks made it. The judge tells
// it when all ranks have made the call or have departed. If they disagree, the judge sends every rank a failure.
//
// Sequence -1 stands for messages: the judge asks in which calls the ranks are, and follows which rank waits for which.
//
// The class has no links and no clock: it sends frames by a function, and every call passes the time.
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

#include "control/diagnosis.h"
#include "control/frame.h"

namespace unisono {

//! The questions of one judge.
class Judge {
 public:
  using Clock = std::chrono::steady_clock;
  using Send = std::function<void(std::int32_t rank, const Frame& frame)>;

  //! `size`: the number of ranks in the job.
  Judge(std::int32_t size, Send send) : size_(size), send_(std::move(send)) {}

  //! Handles a report of type blocked, mismatch, late or closing.
  void take_report(std::int32_t reporter, const Frame& report, Clock::time_point now);
  //! Handles the answer of a rank to a query.
  void take_answer(std::int32_t from, const Frame& answer);
  //! Notes that a rank has departed, with its farewell.
  void note_departure(std::int32_t rank, const std::string& farewell);
  //! For each open question whose time has come: asks the ranks again, or decides without the missing answers.
  void tick(Clock::time_point now);
  //! When `tick` is due; the maximum if never.
  Clock::time_point next_tick() const;
  //! Returns the failure that the judge has found, once.
  std::optional<Failure> take_failure() { return std::exchange(failure_, std::nullopt); }

 private:
  using Key = std::pair<std::uint64_t, std::int64_t>;  // communicator and sequence
  struct LateRank {
    std::int32_t rank;
    std::int64_t number;     // number of the call or message on that rank
    std::int32_t waits_for;  // of a message: the rank that it waits for
  };
  // The last call of a rank on a communicator that it has closed.
  struct LastCall {
    std::int32_t rank;
    std::uint64_t communicator;
    std::int64_t sequence;
    std::uint64_t digest;
    std::string text;
  };
  // All that the judge knows of one call.
  struct Question {
    Diagnosis diagnosis;
    std::int32_t round = 0;  // distinguishes answers to this question from answers to an earlier one
    std::vector<LateRank> late;
    std::vector<std::int32_t> closing;
    std::chrono::microseconds period{};  // between two rounds; 0: it asks once
    Clock::time_point next_round = Clock::time_point::max();
    Clock::time_point decides_at{};  // even if some ranks have not answered by then
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
  std::map<std::int32_t, std::string> farewells_;  // of departed ranks
  std::deque<LastCall> last_calls_;
  std::int32_t rounds_ = 0;
  std::optional<Failure> failure_;
};

}  // namespace unisono
