#include "control/diagnosis.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace unisono {
namespace {

bool has_called(const RankReport& report) {
  return report.state == CallState::running || report.state == CallState::returned;
}

std::string rank_text(std::int32_t rank) { return "rank " + std::to_string(rank); }

std::string departure_text(const RankReport& report) {
  return report.text.empty() ? " has left" : " has left (" + report.text + ")";
}

constexpr const char* silence = " does not answer (is it stopped, or the link to it slow?)";

//! Returns `clause`, which is about one rank, as a clause about several ranks.
std::string about_several(std::string clause) {
  static const std::vector<std::pair<std::string, std::string>> words{{" has not called it", " have not called it"},
                                                                      {" has left", " have left"},
                                                                      {" does not answer", " do not answer"},
                                                                      {"(is it stopped", "(are they stopped"},
                                                                      {"the link to it slow", "the links to them slow"},
                                                                      {"(it has called", "(each has called"},
                                                                      {"(it is in", "(each is in"}};
  for (const auto& [one, several] : words) {
    const auto at = clause.find(one);
    if (at != std::string::npos) clause = clause.substr(0, at) + several + clause.substr(at + one.size());
  }
  return clause;
}

//! Collects clauses about ranks, such as "rank 3 has left", for an error. Ranks with the same clause are named
//! together.
class Clauses {
 public:
  void add(std::size_t rank, const std::string& clause) {
    const auto same =
        std::find_if(clauses_.begin(), clauses_.end(), [&](const auto& each) { return each.first == clause; });
    auto& ranks =
        same == clauses_.end() ? clauses_.emplace_back(clause, std::vector<std::int32_t>{}).second : same->second;
    ranks.push_back(static_cast<std::int32_t>(rank));
  }

  //! The rank that was added first; -1 if there is none.
  std::int32_t first() const { return clauses_.empty() ? -1 : clauses_.front().second.front(); }

  std::string text() const {
    std::string text;
    for (const auto& [clause, ranks] : clauses_)
      text.append(text.empty() ? "" : "; ")
          .append(ranks_text(ranks))
          .append(ranks.size() == 1 ? clause : about_several(clause));
    return text;
  }

 private:
  std::vector<std::pair<std::string, std::vector<std::int32_t>>> clauses_;
};

}  // namespace

std::string ranks_text(const std::vector<std::int32_t>& ranks) {
  if (ranks.size() == 1) return rank_text(ranks.front());
  std::string text = "ranks ";
  const bool consecutive = ranks.size() > 2 && std::is_sorted(ranks.begin(), ranks.end()) &&
                           ranks.back() - ranks.front() == static_cast<std::int32_t>(ranks.size()) - 1;
  if (consecutive) return text + std::to_string(ranks.front()) + "-" + std::to_string(ranks.back());
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
  return text;
}

bool Diagnosis::is_complete() const {
  return std::all_of(ranks.begin(), ranks.end(), [](const RankReport& report) { return report.unanswered == 0; });
}

bool Diagnosis::all_have_called() const {
  return std::none_of(ranks.begin(), ranks.end(), [](const RankReport& report) {
    return report.state == CallState::unknown || report.state == CallState::not_called;
  });
}

std::optional<Failure> Diagnosis::verdict(bool final) const {
  if (sequence < 0 || (!final && !is_complete())) return std::nullopt;
  if (auto failure = disagreement()) {
    const bool some_may_call = std::any_of(
        ranks.begin(), ranks.end(), [](const RankReport& report) { return report.state == CallState::not_called; });
    return final || !some_may_call ? failure : std::nullopt;
  }
  // A rank that had not made the call when it answered may be the one that has sent the message since. Its next answer
  // shows which call it made.
  if (mismatch_reporter >= 0 && (final || all_have_called()))
    return Failure{FailureKind::mismatch, mismatch_reporter, -1, sequence, mismatch};
  return std::nullopt;
}

// The call of most ranks is taken as the right one. If two calls have equally many ranks, it is the call of the lowest
// rank.
std::optional<Failure> Diagnosis::disagreement() const {
  std::map<std::uint64_t, std::vector<std::int32_t>> callers;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (has_called(ranks[rank])) callers[ranks[rank].digest].push_back(static_cast<std::int32_t>(rank));
  if (callers.size() < 2) return std::nullopt;
  const auto right = std::max_element(callers.begin(), callers.end(), [](const auto& a, const auto& b) {
    return a.second.size() != b.second.size() ? a.second.size() < b.second.size() : a.second.front() > b.second.front();
  });
  auto wrong = callers.end();
  for (auto group = callers.begin(); group != callers.end(); ++group)
    if (group != right && (wrong == callers.end() || group->second.front() < wrong->second.front())) wrong = group;
  const std::int32_t divergent = wrong->second.front();
  const auto text_of = [&](std::int32_t rank) { return ranks[static_cast<std::size_t>(rank)].text; };
  return Failure{FailureKind::mismatch, mismatch_reporter, divergent, sequence,
                 "ranks disagree on call #" + std::to_string(sequence) + ": " + ranks_text(wrong->second) + " called " +
                     text_of(divergent) + ", where " + ranks_text(right->second) + " called " +
                     text_of(right->second.front())};
}

Outlook Diagnosis::outlook(std::int32_t rank, std::int32_t waits_for) const {
  return sequence >= 0 ? outlook_of_call() : outlook_of_message(rank, waits_for);
}

Outlook Diagnosis::outlook_of_call() const {
  Outlook outlook;
  Clauses clauses;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].state == CallState::not_called && !ranks[rank].is_silent())
      clauses.add(rank, " has not called it (" + ranks[rank].text + ")");
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].state == CallState::departed) clauses.add(rank, departure_text(ranks[rank]));
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].state != CallState::departed && ranks[rank].is_silent()) clauses.add(rank, silence);
  outlook.peer = clauses.first();
  std::string why = clauses.text();
  if (why.empty()) why = "all ranks have called it, and it did not end";
  std::vector<std::int32_t> callers;
  std::size_t elsewhere = 0;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (has_called(ranks[rank])) callers.push_back(static_cast<std::int32_t>(rank));
    if (ranks[rank].is_in_another_call()) ++elsewhere;
  }
  // Most ranks are in another call. So the few ranks that wait in this call have probably made the wrong one.
  if (!callers.empty() && callers.size() < elsewhere) why.insert(0, "only " + ranks_text(callers) + " called it; ");
  const auto caller = std::find_if(ranks.begin(), ranks.end(), has_called);
  const std::string call = caller == ranks.end() ? "" : " " + caller->text;
  outlook.text = " in call #" + std::to_string(sequence) + call + ": " + why;
  return outlook;
}

// Follows the ranks that wait for each other, beginning with `waits_for`: "rank 2 is in recv(source=1, tag=0) at
// ring.py:9; rank 1 does not answer (is it stopped, or the link to it slow?)".
Outlook Diagnosis::outlook_of_message(std::int32_t rank, std::int32_t waits_for) const {
  Outlook outlook{waits_for, ""};
  std::set<std::int32_t> seen{rank};
  std::string separator = ": ";
  for (std::int32_t at = waits_for; at >= 0 && at < static_cast<std::int32_t>(ranks.size());) {
    const RankReport& report = ranks[static_cast<std::size_t>(at)];
    outlook.peer = at;
    outlook.text += std::exchange(separator, "; ") + rank_text(at);
    if (report.state == CallState::departed) {
      outlook.text += departure_text(report);
    } else if (report.is_silent()) {
      outlook.text += silence;
    } else if (report.state != CallState::running) {
      outlook.text += " is in no call (" + report.text + ")";
    } else {
      outlook.text += " is in " + report.text;
      seen.insert(at);
      at = report.waits_for;
      if (seen.contains(at)) {
        outlook.text += seen.size() > 1 ? ": these ranks wait for each other" : "";
        return outlook;
      }
      continue;
    }
    return outlook;
  }
  return outlook;
}

}  // namespace unisono
