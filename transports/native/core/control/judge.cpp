#include "control/judge.h"

#include <algorithm>

namespace unisono {
namespace {

using namespace std::chrono_literals;

// How long a judge waits for answers, and for ranks that have not made the call, before it decides without them.
constexpr auto decision_time = 1000ms;
// A judge asks about a late call until this long after its deadline, because a slow rank may notice the deadline later.
constexpr auto overtime = 100ms;
// Bounds of the time between two rounds about a late call, which is a quarter of the remaining time.
constexpr std::chrono::microseconds shortest_period = 2ms;
constexpr std::chrono::microseconds longest_period = 100ms;
constexpr std::chrono::microseconds closing_period = 5ms;
// How many questions a judge keeps, and how many last calls of communicators that were closed. It drops the oldest.
constexpr std::size_t most_questions = 256;
constexpr std::size_t most_last_calls = 1024;
// How many reports of one type a judge keeps for a question. Each rank sends a few.
constexpr std::size_t most_reports = 1 << 16;

// Whether a rank may report this state of itself to a judge.
bool is_an_answer(CallState state) {
  return state == CallState::not_called || state == CallState::running || state == CallState::returned ||
         state == CallState::forgotten;
}

}  // namespace

void Judge::take_report(std::int32_t reporter, const Frame& report, Clock::time_point now) {
  const bool is_new = !questions_.contains({report.communicator, report.sequence});
  Question& question = question_of(report, now);
  if (report.type == FrameType::mismatch && question.diagnosis.mismatch_reporter < 0) {
    question.diagnosis.mismatch_reporter = reporter;
    question.diagnosis.mismatch = report.text;
  }
  if (report.type == FrameType::late) add_late(question, reporter, report, now);
  if (report.type == FrameType::closing) add_closing(question, reporter, report, now);
  if (is_new || report.type != FrameType::blocked)
    ask_all(question, now);
  else
    ask(question, reporter);
}

Judge::Question& Judge::question_of(const Frame& report, Clock::time_point now) {
  const Key key{report.communicator, report.sequence};
  if (const auto entry = questions_.find(key); entry != questions_.end()) return entry->second;
  if (questions_.size() >= most_questions)
    questions_.erase(std::min_element(questions_.begin(), questions_.end(), [](const auto& a, const auto& b) {
      return a.second.expires < b.second.expires;
    }));
  Question& question = questions_[key];
  const CallState outsider = report.members.empty() ? CallState::unknown : CallState::outside;
  question.diagnosis = {key.first, key.second, std::vector<RankReport>(static_cast<std::size_t>(size_)), -1, ""};
  for (RankReport& rank : question.diagnosis.ranks) rank.state = outsider;
  for (const std::int32_t member : report.members)
    if (member >= 0 && member < size_)
      question.diagnosis.ranks[static_cast<std::size_t>(member)].state = CallState::unknown;
  question.decides_at = question.expires = now + decision_time;
  return question;
}

void Judge::add_late(Question& question, std::int32_t reporter, const Frame& report, Clock::time_point now) {
  const auto time_left = std::chrono::microseconds(std::min<std::uint64_t>(report.time_left_us, 60'000'000));
  if (question.late.size() < most_reports) question.late.push_back({reporter, report.number, report.waits_for});
  question.expires = std::max(question.expires, now + time_left + overtime);
  repeat_within(question, std::clamp(time_left / 4, shortest_period, longest_period), now);
}

void Judge::add_closing(Question& question, std::int32_t reporter, const Frame& report, Clock::time_point now) {
  last_calls_.push_back({reporter, report.communicator, report.sequence, report.digest, report.text});
  if (last_calls_.size() > most_last_calls) last_calls_.pop_front();
  const auto time_left = std::chrono::microseconds(std::min<std::uint64_t>(report.time_left_us, 60'000'000));
  if (question.closing.size() < most_reports) question.closing.push_back(reporter);
  question.expires = std::max(question.expires, now + time_left);
  repeat_within(question, closing_period, now);
}

void Judge::repeat_within(Question& question, std::chrono::microseconds time, Clock::time_point now) {
  question.period = question.period == 0us ? time : std::min(question.period, time);
  question.next_round = now + question.period;
}

void Judge::ask_all(Question& question, Clock::time_point now) {
  question.round = ++rounds_;
  if (question.period != 0us) question.next_round = now + question.period;
  const Key key{question.diagnosis.communicator, question.diagnosis.sequence};
  for (std::int32_t rank = 0; rank < size_; ++rank) {
    RankReport& report = question.diagnosis.ranks[static_cast<std::size_t>(rank)];
    if (report.state == CallState::outside) continue;
    if (farewells_.contains(rank))
      report = departed(rank, key);
    else
      ++report.unanswered;
  }
  for (std::int32_t rank = 0; rank < size_; ++rank)
    if (question.diagnosis.ranks[static_cast<std::size_t>(rank)].unanswered != 0) ask(question, rank);
}

void Judge::ask(Question& question, std::int32_t rank) {
  Frame query;
  query.type = FrameType::query;
  query.communicator = question.diagnosis.communicator;
  query.sequence = question.diagnosis.sequence;
  query.peer = question.round;
  send_(rank, query);
}

void Judge::take_answer(std::int32_t from, const Frame& answer) {
  const auto entry = questions_.find({answer.communicator, answer.sequence});
  if (entry == questions_.end()) return;
  RankReport& report = entry->second.diagnosis.ranks[static_cast<std::size_t>(from)];
  if (report.state == CallState::outside || farewells_.contains(from) || !is_an_answer(answer.state)) return;
  report = {answer.state, answer.digest, answer.text, answer.waits_for, 0};
  decide(entry->second, false);
}

void Judge::note_departure(std::int32_t rank, const std::string& farewell) {
  farewells_.try_emplace(rank, farewell);
  for (auto& [key, question] : questions_) {
    RankReport& report = question.diagnosis.ranks[static_cast<std::size_t>(rank)];
    if (report.state == CallState::outside) continue;
    report = departed(rank, key);
    decide(question, false);
  }
}

// Returns the report of a departed rank. The rank has made the call if it had announced that this call was its last
// one.
RankReport Judge::departed(std::int32_t rank, const Key& call) const {
  RankReport report{CallState::departed, 0, farewells_.at(rank), -1, 0};
  for (const LastCall& last : last_calls_)
    if (last.rank == rank && last.communicator == call.first && last.sequence == call.second)
      report = {CallState::returned, last.digest, last.text, -1, 0};
  return report;
}

void Judge::tick(Clock::time_point now) {
  for (auto& [key, question] : questions_) {
    if (now >= question.decides_at) {
      question.decides_at = Clock::time_point::max();
      decide(question, true);
    }
    if (now < question.next_round) continue;
    send_outlooks(question);
    ask_all(question, now);
  }
  std::erase_if(questions_, [&](const auto& entry) {
    return now >= entry.second.expires && entry.second.decides_at == Clock::time_point::max();
  });
}

Judge::Clock::time_point Judge::next_tick() const {
  auto earliest = Clock::time_point::max();
  for (const auto& [key, question] : questions_)
    earliest = std::min({earliest, question.decides_at, question.next_round, question.expires});
  return earliest;
}

void Judge::decide(Question& question, bool final) {
  if (auto failure = question.diagnosis.verdict(final)) {
    if (!failure_) failure_ = std::move(failure);
    return;
  }
  if (!question.diagnosis.is_complete()) return;
  send_outlooks(question);
  settle(question);
}

void Judge::send_outlooks(const Question& question) {
  for (const LateRank& late : question.late) {
    const Outlook outlook = question.diagnosis.outlook(late.rank, late.waits_for);
    Frame frame;
    frame.type = FrameType::outlook;
    frame.communicator = question.diagnosis.communicator;
    frame.sequence = question.diagnosis.sequence;
    frame.number = late.number;
    frame.peer = outlook.peer;
    frame.text = outlook.text;
    send_(late.rank, frame);
  }
}

void Judge::settle(Question& question) {
  if (question.closing.empty() || !question.diagnosis.all_have_called()) return;
  Frame frame;
  frame.type = FrameType::settled;
  frame.communicator = question.diagnosis.communicator;
  frame.sequence = question.diagnosis.sequence;
  for (const std::int32_t rank : std::exchange(question.closing, {})) send_(rank, frame);
}

}  // namespace unisono
