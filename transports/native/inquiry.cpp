#include "inquiry.h"

#include <algorithm>
#include <map>

namespace unisono {
namespace {

bool called(const Testimony& testimony) {
  return testimony.state == CallState::running || testimony.state == CallState::returned;
}

}  // namespace

std::string ranks_text(const std::vector<std::int32_t>& ranks) {
  if (ranks.size() == 1) return "rank " + std::to_string(ranks.front());
  std::string text = "ranks ";
  const bool consecutive = ranks.size() > 2 && std::is_sorted(ranks.begin(), ranks.end()) &&
                           ranks.back() - ranks.front() == static_cast<std::int32_t>(ranks.size()) - 1;
  if (consecutive) return text + std::to_string(ranks.front()) + "-" + std::to_string(ranks.back());
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
  return text;
}

bool Inquiry::any(CallState state) const {
  return std::any_of(ranks.begin(), ranks.end(), [=](const Testimony& testimony) { return testimony.state == state; });
}

std::optional<Failure> Inquiry::verdict(bool final) const {
  if (!final && any(CallState::unknown)) return std::nullopt;
  if (auto found = disagreement()) {
    // Who is right is decided by the number of those who say so, and who has not called it yet may soon.
    return final || !any(CallState::not_called) ? found : std::nullopt;
  }
  if (reason == FrameType::timed_out) return timeout();
  if (reason == FrameType::mismatch) return Failure{FailureKind::mismatch, reporter, -1, sequence, report};
  return std::nullopt;
}

std::string Inquiry::call_text() const {
  const auto found = std::find_if(ranks.begin(), ranks.end(), called);
  return found == ranks.end() ? "" : " " + found->text;
}

// The call that most ranks made is taken to be the right one; of equally many, the one made by the lowest rank.
std::optional<Failure> Inquiry::disagreement() const {
  std::map<std::uint64_t, std::vector<std::int32_t>> callers;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (called(ranks[rank])) callers[ranks[rank].digest].push_back(static_cast<std::int32_t>(rank));
  if (callers.size() < 2) return std::nullopt;
  const auto right = std::max_element(callers.begin(), callers.end(), [](const auto& a, const auto& b) {
    return a.second.size() != b.second.size() ? a.second.size() < b.second.size() : a.second.front() > b.second.front();
  });
  auto wrong = callers.end();
  for (auto group = callers.begin(); group != callers.end(); ++group)
    if (group != right && (wrong == callers.end() || group->second.front() < wrong->second.front())) wrong = group;
  const std::int32_t divergent = wrong->second.front();
  const auto text_of = [&](std::int32_t rank) { return ranks[static_cast<std::size_t>(rank)].text; };
  return Failure{FailureKind::mismatch, reporter, divergent, sequence,
                 "ranks disagree on call #" + std::to_string(sequence) + ": " + ranks_text(wrong->second) + " called " +
                     text_of(divergent) + ", where " + ranks_text(right->second) + " called " +
                     text_of(right->second.front())};
}

Failure Inquiry::timeout() const {
  std::string why;
  std::int32_t missing = -1;
  const auto add = [&](CallState state, auto&& say) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (ranks[rank].state != state) continue;
      if (missing < 0) missing = static_cast<std::int32_t>(rank);
      why.append(why.empty() ? "rank " : "; rank ").append(std::to_string(rank)).append(say(ranks[rank]));
    }
  };
  add(CallState::not_called, [](const Testimony& testimony) { return " has not called it (" + testimony.text + ")"; });
  add(CallState::left, [](const Testimony& testimony) {
    std::string text(" has left");
    if (!testimony.text.empty()) text.append(" (").append(testimony.text).append(")");
    return text;
  });
  add(CallState::unknown, [](const Testimony&) { return std::string(" does not answer (is it stopped?)"); });
  if (why.empty()) why = "all ranks have called it, and it did not end";
  return {FailureKind::timeout, reporter, missing, sequence,
          report + " in call #" + std::to_string(sequence) + call_text() + ": " + why};
}

}  // namespace unisono
