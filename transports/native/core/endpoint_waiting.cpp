// How threads wait for the calls of an endpoint: see endpoint.h for the theory.
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <thread>
#include <utility>

#include "endpoint.h"
#include "fence.h"
#include "scheduling.h"

namespace unisono {
namespace {

using namespace std::chrono_literals;

// Rounds without progress that a waiting rank spins, and then yields, before it sleeps.
constexpr std::uint32_t spin_rounds = 300;
constexpr std::uint32_t yield_rounds = 300;
constexpr std::uint32_t contended_yield_rounds = 30;
// How often a rank in a crowd gives its turn away before it settles down to wait, which takes as long as a turn of
// those others that only have to take part; and then, before it looks at more than what it waits for.
constexpr std::uint32_t turns_given_at_once = 4;
constexpr std::uint32_t turns_given_away = 8;
constexpr std::uint32_t serving_spin_rounds = 30;
// How often a spinning rank looks at the clock.
constexpr std::uint32_t rounds_per_look = 128;
// A yield that takes longer has let others use the core, who will want it again for a while.
constexpr auto shared_yield = 30us;
constexpr auto contended_time = 5ms;
constexpr auto check_period = 1ms;
// A blocked call is reported when it has not moved for 10 ms, 1 s, and then every 30 s: a rank that disagrees may call
// later, and go on without waiting.
constexpr auto second_report = 1000ms;
constexpr auto report_period = 30s;
// A call is late from half of its time on, or from 2 s before its deadline.
constexpr double most_late_s = 2;
constexpr auto signal_check_period = 20ms;
constexpr auto longest_sleep = 20ms;
// A channel that a peer has opened before it left may not have been taken in yet.
constexpr auto admission_time = 300ms;

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

Request::Clock::rep after(double seconds) {
  using Clock = Request::Clock;
  const auto now = Clock::now().time_since_epoch();
  const double most = std::chrono::duration<double>(Clock::duration::max() - now).count() / 2;
  return (now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, most))))
      .count();
}

}  // namespace

void Endpoint::set_deadline(Request& request, double timeout_s) {
  request.timeout_s_ = timeout_s;
  request.late_from_ = after(timeout_s - std::min(timeout_s / 2, most_late_s));
  request.deadline_ = after(timeout_s);
}

void Endpoint::give_up_lead() {
  lead_->give_up();
  if (going_on_.load() != 0) wake_server();
}

void Endpoint::wake_server() {
  if (server_idle_.exchange(false)) server_bell_.ring();
}

// For what must be done soon, by a thread that does not wait for a call.
void Endpoint::take_lead() {
  if (lead_->try_take()) return;
  const LeadershipRequest wanting(*lead_);
  while (!lead_->try_take()) {
    doorbell_.ring();
    lead_->follow(longest_sleep, [this] { return !lead_->taken(); });
  }
}

Outcome Endpoint::poll(Request& request) {
  if (request.outcome() == Outcome::pending && lead_->try_take()) {
    drive();
    if (request.outcome() == Outcome::pending && check_closed()) drive();
    give_up_lead();
  }
  return request.outcome();
}

void Endpoint::look(const Request& request, std::uint32_t rounds) {
  if (!lead_->try_take()) return;
  look_for([&] { return request.outcome() != Outcome::pending; }, [&] { return drive(); }, affordable(rounds));
  give_up_lead();
}

void Endpoint::give_turns(const Request& request) {
  for (std::uint32_t turn = 0; turn < turns_given_at_once && request.outcome() == Outcome::pending; ++turn) {
    ::sched_yield();
    look(request, 1);
  }
}

Outcome Endpoint::wait(Request& request, double timeout_s, Interrupted interrupted) {
  set_deadline(request, timeout_s);
  auto next_signal_check = Clock::now() + signal_check_period;
  Idle idle;
  bool was_interrupted = false;
  // What goes on by itself, and does not end while this thread spins, is left to the endpoint's own thread: that runs
  // as soon as something arrives, and this one, where others want its core, only in its turn.
  const bool is_served = !crowded_ && goes_on(request);
  bool leads = false;
  bool is_left = false;
  std::optional<LeadershipRequest> wanting;
  while (request.outcome() == Outcome::pending) {
    if (!leads && !is_left) leads = lead_->try_take();
    if (!leads) {
      is_left = is_served;
      if (!is_left && !wanting) wanting.emplace(*lead_);
      is_left ? await(request) : follow(request);
      idle.looked = Clock::now();
    } else if (drive()) {
      idle.rounds = 0;
    } else if (is_served && idle.rounds >= spins(idle, false)) {
      is_left = true;
      leads = false;
      give_up_lead();
    } else {
      rest(idle, false);
    }
    if (idle.looked < next_signal_check || was_interrupted) continue;
    next_signal_check = idle.looked + signal_check_period;
    if (std::exchange(leads, false)) give_up_lead();
    was_interrupted = interrupted != nullptr && interrupted();
    if (was_interrupted)
      control_->fail({FailureKind::aborted, rank(), rank(), request.sequence_,
                      "rank " + std::to_string(rank()) + " was interrupted"});
  }
  wanting.reset();
  if (leads)
    give_up_lead();
  else if (going_on_.load() != 0)
    wake_server();
  return was_interrupted ? Outcome::interrupted : request.outcome();
}

// Until the request has ended or the lead is free.
void Endpoint::follow(const Request& request) {
  wake_leader();
  lead_->follow(longest_sleep, [&] { return request.outcome() != Outcome::pending || !lead_->taken(); });
}

// Until the request has ended, which another thread sees to.
void Endpoint::await(const Request& request) {
  awaited_.fetch_add(1, std::memory_order_relaxed);
  lead_->follow(longest_sleep, [&] { return request.outcome() != Outcome::pending; });
  awaited_.fetch_sub(1, std::memory_order_relaxed);
}

bool Endpoint::goes_on(const Request& request) const {
  const std::lock_guard lock(mutex_);
  return request.goes_on_;
}

std::uint64_t Endpoint::wait_for_end(std::uint64_t seen, std::chrono::milliseconds most) {
  lead_->follow(most, [&] { return ended_.load() != seen || closed_; });
  return ended_.load();
}

// What the endpoint's own thread does. Whoever starts a call shall not lose its core to this thread at once, but what
// arrives for a call that goes on shall be dealt with at once, though the program computes: so the thread is patient as
// long as there is nothing to do, and then prompt.
void Endpoint::serve() {
  const auto is_needed = [this] { return going_on_.load() != 0 && !lead_->wanted() && !lead_->taken(); };
  while (!closed_) {
    if (!is_needed()) {
      set_waking(Waking::patient);
      server_idle_ = true;
      pollfd bell{server_bell_.get(), POLLIN, 0};
      if (!closed_ && !is_needed()) ::poll(&bell, 1, -1);
      server_bell_.drain();
      set_waking(Waking::prompt);
    }
    if (!is_needed() || !lead_->try_take()) continue;
    for (Idle idle; going_on_.load() != 0 && !lead_->wanted() && !closed_;) {
      if (drive())
        idle.rounds = 0;
      else
        rest(idle, true);
    }
    give_up_lead();
  }
}

bool Endpoint::shares_core(const Idle& idle) const { return crowded_ || idle.looked < contended_until_; }

// Whether a look for progress takes no system call.
bool Endpoint::looks_are_cheap() const {
  const std::vector<Blocked> waits = blocked();
  return std::none_of(waits.begin(), waits.end(),
                      [](const Blocked& on) { return on.channel != nullptr && on.channel->asks_kernel(); });
}

// How many rounds to spin. The endpoint's own thread does so for the program where that waits for it.
std::uint32_t Endpoint::spins(const Idle& idle, bool serving) const {
  if (!idle.is_worthwhile) return 0;
  if (serving && awaited_.load(std::memory_order_relaxed) == 0) return serving_spin_rounds;
  return shares_core(idle) ? 0 : spin_rounds;
}

// How many rounds to offer the core to others after that. The endpoint's own thread does so as long as nobody takes it:
// on a core that has fallen asleep, it would wake late.
std::uint32_t Endpoint::yields(const Idle& idle, bool serving) const {
  if (!shares_core(idle)) return idle.is_worthwhile ? yield_rounds + patience_.load() : 0;
  return serving ? 0 : contended_yield_rounds;
}

// Passes the time until it makes sense to look for progress again.
void Endpoint::rest(Idle& idle, bool serving) {
  if (serving && idle.rounds == 0)
    idle.is_worthwhile = awaited_.load(std::memory_order_relaxed) != 0 || looks_are_cheap();
  const std::uint32_t spins = this->spins(idle, serving);
  const std::uint32_t yields = this->yields(idle, serving);
  const std::uint32_t round = ++idle.rounds;
  if (round <= spins) {
    relax();
    if (round % rounds_per_look == 0) look_around(idle);
    return;
  }
  look_around(idle);
  if (round > spins + yields) {
    sleep(idle, serving);
    return;
  }
  if (crowded_) {
    yield_in_crowd();
    return;
  }
  ::sched_yield();
  const auto now = Clock::now();
  if (now - idle.looked > shared_yield) contended_until_ = now + contended_time;
}

// Between two turns of a rank others have filled the caches, so that it matters how much it touches in each: only the
// lines where something would arrive.
void Endpoint::yield_in_crowd() {
  const std::vector<Blocked> waits = blocked();
  const auto stirs = [](const Blocked& on) {
    return on.channel == nullptr || on.channel->stirs(on.sends, on.receives);
  };
  for (std::uint32_t turn = 0; turn < turns_given_away; ++turn) {
    ::sched_yield();
    if (std::any_of(waits.begin(), waits.end(), stirs)) return;
  }
}

void Endpoint::look_around(Idle& idle) {
  const auto now = idle.looked = Clock::now();
  if (now < next_check_) return;
  next_check_ = now + check_period;
  if (current_ != nullptr) {
    if (!current_->idle_since_) current_->idle_since_ = now;
    if (now - *current_->idle_since_ >= current_->next_report_) {
      current_->next_report_ =
          current_->next_report_ < second_report ? second_report : current_->next_report_ + report_period;
      control_->report_blocked(communicator_, members_, current_->sequence_);
    }
  }
  check_deadlines(now);
}

// The requests that have a deadline, begun or not.
std::vector<Request*> Endpoint::pending() const {
  std::vector<Request*> requests(messages_);
  if (current_ != nullptr) requests.push_back(current_);
  if (handed_in_.load() != 0) {
    const std::lock_guard lock(mutex_);
    requests.insert(requests.end(), collectives_.begin(), collectives_.end());
  }
  return requests;
}

void Endpoint::check_deadlines(Clock::time_point now) {
  for (Request* request : pending())
    if (!control_->failed()) check_deadline(*request, now);
}

void Endpoint::check_deadline(Request& request, Clock::time_point now) {
  const auto time = now.time_since_epoch().count();
  if (time < request.late_from_) return;
  if (!request.reported_late_) report_late(request);
  if (time >= request.deadline_) time_out(request);
}

std::chrono::microseconds Endpoint::time_to_next_deadline() const {
  auto next = Clock::time_point::max().time_since_epoch().count();
  for (const Request* request : pending())
    next = std::min(next, request->reported_late_ ? request->deadline_.load() : request->late_from_.load());
  const auto left = Clock::duration(next) - Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(std::max(left, Clock::duration::zero()));
}

// Asks the judges why a call does not go on: what they say by the deadline stands in its error.
void Endpoint::report_late(Request& request) {
  request.reported_late_ = true;
  const Clock::time_point deadline{Clock::duration(request.deadline_)};
  if (request.call_ != nullptr)
    control_->report_late(communicator_, members_, current_sequence(), -1, -1, deadline);
  else
    control_->report_late(communicator_, members_, -1, request.number_, peer_of(request), deadline);
}

// Sleeps until something can move, the doorbell rings, a signal arrives, or the time for looking around has come.
void Endpoint::sleep(Idle& idle, bool serving) {
  std::vector<pollfd> descriptors{{doorbell_.get(), POLLIN, 0}};
  if (unjudged_ || check_closed()) {
    // Only the control links bring news now, and they ring the doorbell. The channels would wake this thread at once.
    if (!control_->failed()) ::poll(descriptors.data(), 1, static_cast<int>(longest_sleep.count()));
    doorbell_.drain();
    return;
  }
  const std::vector<Blocked> waits = blocked();
  for (const Blocked& on : waits)
    if (on.channel != nullptr) on.channel->prepare_sleep(on.sends, on.receives, descriptors);
  asleep_ = true;
  heavy_fence();
  const bool moved = drive();
  if (!moved && !disturbed(serving)) {
    std::chrono::microseconds most = std::min<std::chrono::microseconds>(longest_sleep, time_to_next_deadline());
    for (const Blocked& on : waits)
      if (on.channel != nullptr) most = std::min(most, on.channel->doze());
    const timespec time{0, std::chrono::nanoseconds(most).count()};
    ::ppoll(descriptors.data(), descriptors.size(), &time, nullptr);
    doorbell_.drain();
  }
  asleep_ = false;
  for (const Blocked& on : waits)
    if (on.channel != nullptr) on.channel->cancel_sleep();
  if (moved) idle.rounds = 0;
}

// Whether there is something to be done that the doorbell may have been rung for before this thread fell asleep.
bool Endpoint::disturbed(bool serving) const {
  if (closed_ || control_->failed() || may_begin()) return true;
  return serving && (lead_->wanted() || going_on_.load() == 0);
}

// Whether something has been handed in that need not wait for the collective before it.
bool Endpoint::may_begin() const {
  if (handed_in_.load() == 0) return false;
  const std::lock_guard lock(mutex_);
  return !new_messages_.empty() || (current_ == nullptr && !collectives_.empty());
}

std::vector<Blocked> Endpoint::blocked() const {
  std::vector<Blocked> found;
  if (current_ != nullptr) collective_.blocked_on(found);
  for (const auto& [place, mailbox] : mailboxes_) mailbox->blocked_on(found);
  return found;
}

bool Endpoint::gone(const Blocked& on) const {
  if (on.channel != nullptr) return on.channel->closed();
  return control_->departed_by(job_rank(on.peer), Clock::now() - admission_time);
}

// A channel on which something waits and whose peer has gone will bring nothing more once it has been read empty. True
// if there is such a one that is needed, or if all that wait for any peer wait in vain.
bool Endpoint::check_closed() {
  const std::vector<Blocked> waits = blocked();
  auto lost = std::find_if(waits.begin(), waits.end(), [this](const Blocked& on) { return on.needed && gone(on); });
  // What may come from any peer is posted for each of them.
  const auto may_come = [this](const Blocked& on) { return on.receives && !gone(on); };
  if (lost == waits.end() && std::none_of(waits.begin(), waits.end(), may_come))
    lost = std::find_if(waits.begin(), waits.end(), [](const Blocked& on) { return !on.needed; });
  if (lost == waits.end()) return false;
  if (!drive() && !control_->failed()) {
    const std::int32_t peer = job_rank(lost->peer);
    control_->suspect(peer, current_sequence(), "rank " + std::to_string(peer) + " closed its connection");
  }
  return true;
}

void Endpoint::time_out(const Request& request) {
  std::string text = "rank " + std::to_string(rank()) + " waited " + seconds_text(request.timeout_s_);
  if (request.call_ != nullptr) {
    const std::int64_t sequence = current_sequence();
    const Outlook outlook = control_->outlook(communicator_, sequence, -1);
    control_->fail({FailureKind::timeout, rank(), outlook.peer, sequence, text + outlook.text});
    return;
  }
  const std::int32_t peer = peer_of(request);
  const std::string name = peer >= 0 ? "rank " + std::to_string(peer) : "any rank";
  text += request.message_->sends() ? " for " + name + " to receive its message" : " for a message from " + name;
  if (request.operation_ != nullptr) text += request.operation_->unclaimed_text();
  const Outlook outlook = control_->outlook(communicator_, -1, request.number_);
  control_->fail({FailureKind::timeout, rank(), outlook.peer >= 0 ? outlook.peer : peer, -1, text + outlook.text});
}

// The rank of the job that a message goes to or comes from; -1 for any.
std::int32_t Endpoint::peer_of(const Request& request) const {
  const auto& peer = request.message_->peer;
  return peer ? job_rank(*peer) : -1;
}

}  // namespace unisono
