// How threads wait for calls of an endpoint. The theory is in endpoint.h.
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <thread>
#include <utility>

#include "endpoint/endpoint.h"
#include "system/fence.h"
#include "system/scheduling.h"

namespace unisono {
namespace {

using namespace std::chrono_literals;

// A waiting rank looks for progress again and again. After this many vain looks it no longer spins but yields its core
// between looks, and after as many again as the second number it sleeps. The third number replaces the second while
// other threads want the core.
constexpr std::uint32_t spin_rounds = 300;
constexpr std::uint32_t yield_rounds = 300;
constexpr std::uint32_t contended_yield_rounds = 30;
// The number of yields before a rank starts to wait if its host has more ranks than cores. They take as long as one
// time slice of ranks that only pass messages on. The second number counts the yields between two looks at all
// channels.
constexpr std::uint32_t yields_before_waiting = 4;
constexpr std::uint32_t yields_between_looks = 8;
// So many further rounds of yields are omitted after one in which no other thread has run.
constexpr std::uint32_t omitted_rounds = 10;
constexpr std::uint32_t serving_spin_rounds = 30;
// Looks between two readings of the clock while spinning.
constexpr std::uint32_t rounds_per_check = 128;
constexpr auto check_period = 1ms;
// A rank reports a call as blocked after 10 ms without progress, then after 1 s, and then every 30 s. It repeats the
// report, because a rank that makes a different call may make it later, and may not wait in it at all.
constexpr auto second_report = 1000ms;
constexpr auto report_period = 30s;
// A call is late once half of its time has passed, or 2 s before its deadline if that is later.
constexpr double most_late_s = 2;
// The judges are asked this long before the answer is to be reported.
constexpr auto most_asking_time = 500ms;
// Broken connections are reported again after this time.
constexpr auto loss_report_period = 50ms;
constexpr auto signal_check_period = 20ms;
constexpr auto longest_sleep = 20ms;

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

void Endpoint::step_down() {
  leadership_->step_down();
  if (background_count_.load() != 0) wake_server();
}

void Endpoint::wake_server() {
  if (server_idle_.exchange(false)) server_bell_.ring();
}

// Makes this thread the leader of the endpoint, because it has urgent work. Any other leader steps down first.
void Endpoint::take_leadership() {
  if (leadership_->try_take()) return;
  leadership_->begin_urgency();
  while (!leadership_->try_take()) {
    doorbell_.ring();
    leadership_->wait_as_follower(longest_sleep, [this] { return !leadership_->is_taken(); });
  }
  leadership_->end_urgency();
}

// Lets a thread with urgent work take the lead, if this thread has it.
void Endpoint::give_way(bool& leads) {
  if (std::exchange(leads, false)) step_down();
  leadership_->wait_as_follower(longest_sleep, [this] { return !leadership_->is_urgent(); });
}

Outcome Endpoint::poll(Request& request) {
  if (request.outcome() == Outcome::pending && leadership_->try_take()) {
    drive();
    if (request.outcome() == Outcome::pending && check_closed()) drive();
    step_down();
  }
  return request.outcome();
}

void Endpoint::poll_rounds(const Request& request, std::uint32_t rounds) {
  if (!leadership_->try_take()) return;
  poll_until([&] { return request.outcome() != Outcome::pending; }, [&] { return drive(); }, affordable_rounds(rounds));
  step_down();
}

void Endpoint::yield_and_poll(const Request& request) {
  if (!leadership_->try_take()) return;
  auto now = Clock::now();
  for (std::uint32_t turn = 0; turn < yields_before_waiting; ++turn) {
    if (request.outcome() != Outcome::pending || !yields_help()) break;
    now = demand_.yield(now);
    drive();
  }
  step_down();
}

Outcome Endpoint::wait(Request& request, double timeout_s, Interrupted interrupted) {
  set_deadline(request, timeout_s);
  auto next_signal_check = Clock::now() + signal_check_period;
  Idle idle;
  bool was_interrupted = false;
  // A background call that does not end while this thread spins is left to the server. The server runs as soon as a
  // message arrives, but this thread, whose core others want, only in its time slice.
  const bool is_served = !crowded_ && runs_in_background(request);
  bool leads = false;
  bool left_to_server = false;
  LeadershipRequest leadership_request(*leadership_);
  while (request.outcome() == Outcome::pending) {
    if (leadership_->is_urgent()) give_way(leads);
    if (!leads && !left_to_server) leads = leadership_->try_take();
    if (!leads) {
      left_to_server = is_served;
      if (!left_to_server) leadership_request.make();
      left_to_server ? await(request) : follow(request);
      idle.checked_at = Clock::now();
    } else if (drive()) {
      idle.note_progress();
    } else if (is_served && idle.rounds >= spins(idle, false)) {
      left_to_server = true;
      leads = false;
      step_down();
    } else {
      back_off(idle, false);
    }
    if (idle.checked_at < next_signal_check || was_interrupted) continue;
    next_signal_check = idle.checked_at + signal_check_period;
    if (std::exchange(leads, false)) step_down();
    was_interrupted = interrupted != nullptr && interrupted();
    if (was_interrupted)
      control_->fail({FailureKind::aborted, rank(), rank(), request.sequence_,
                      "rank " + std::to_string(rank()) + " was interrupted"});
  }
  leadership_request.withdraw();
  if (leads)
    step_down();
  else if (background_count_.load() != 0)
    wake_server();
  return was_interrupted ? Outcome::interrupted : request.outcome();
}

// Sleeps until the request has ended or there is no leader.
void Endpoint::follow(const Request& request) {
  wake_leader();
  leadership_->wait_as_follower(longest_sleep,
                                [&] { return request.outcome() != Outcome::pending || !leadership_->is_taken(); });
}

// Sleeps until the server has ended the request.
void Endpoint::await(const Request& request) {
  awaited_.fetch_add(1, std::memory_order_relaxed);
  leadership_->wait_as_follower(longest_sleep, [&] { return request.outcome() != Outcome::pending; });
  awaited_.fetch_sub(1, std::memory_order_relaxed);
}

bool Endpoint::runs_in_background(const Request& request) const {
  const std::lock_guard lock(mutex_);
  return request.in_background_;
}

std::uint64_t Endpoint::wait_for_end(std::uint64_t seen, std::chrono::milliseconds most) {
  leadership_->wait_as_follower(most, [&] { return ended_.load() != seen || closed_; });
  return ended_.load();
}

// The loop of the server thread. A thread that starts a call should not lose its core to the server at once. But a
// message for a background call should be handled at once, although the program computes. So the server is patient
// while it has nothing to do, and then prompt.
void Endpoint::serve() {
  const auto is_needed = [this] {
    return background_count_.load() != 0 && !leadership_->is_requested() && !leadership_->is_urgent() &&
           !leadership_->is_taken();
  };
  while (!closed_) {
    if (!is_needed()) {
      set_waking(Waking::patient);
      server_idle_ = true;
      pollfd bell{server_bell_.get(), POLLIN, 0};
      if (!closed_ && !is_needed()) ::poll(&bell, 1, -1);
      server_bell_.drain();
      set_waking(Waking::prompt);
    }
    if (!is_needed() || !leadership_->try_take()) continue;
    const auto may_go_on = [this] { return !leadership_->is_requested() && !leadership_->is_urgent() && !closed_; };
    for (Idle idle; background_count_.load() != 0 && may_go_on();) {
      if (drive())
        idle.note_progress();
      else
        back_off(idle, true);
    }
    step_down();
  }
}

bool Endpoint::shares_core() const { return crowded_ || demand_.level() != Demand::none; }

bool Endpoint::yields_help() const { return demand_.level() != Demand::computing; }

// Whether this thread can look for progress without a system call.
bool Endpoint::polling_is_cheap() const {
  const std::vector<Blocked> waits = blocked();
  return std::none_of(waits.begin(), waits.end(),
                      [](const Blocked& on) { return on.channel != nullptr && on.channel->polls_by_syscall(); });
}

// Returns how many times to look for progress without a pause. The server does so only
// a few times, unless the program waits for it.
std::uint32_t Endpoint::spins(const Idle& idle, bool serving) const {
  if (!idle.polling_pays) return 0;
  if (serving && awaited_.load(std::memory_order_relaxed) == 0) return serving_spin_rounds;
  return shares_core() ? 0 : spin_rounds;
}

// How many looks to yield after spinning. The server yields as long as no other thread takes the core, because it would
// wake late on a core that has fallen asleep.
std::uint32_t Endpoint::yields(const Idle& idle, bool serving) const {
  if (!shares_core()) return idle.polling_pays ? yield_rounds + extra_yields_.load() : 0;
  return serving || !yields_help() ? 0 : contended_yield_rounds;
}

// Waits a little before the next look for progress: spins, yields or sleeps.
void Endpoint::back_off(Idle& idle, bool serving) {
  if (serving && idle.rounds == 0)
    idle.polling_pays = awaited_.load(std::memory_order_relaxed) != 0 || polling_is_cheap();
  const std::uint32_t spins = this->spins(idle, serving);
  const std::uint32_t yields = this->yields(idle, serving);
  const std::uint32_t round = ++idle.rounds;
  if (round <= spins) {
    relax();
    if (round % rounds_per_check == 0) run_periodic_checks(idle);
    return;
  }
  run_periodic_checks(idle);
  if (round > spins + yields) {
    sleep(idle, serving);
    return;
  }
  if (crowded_) {
    yield_in_crowd(idle);
    return;
  }
  const auto now = demand_.yield(idle.checked_at);
  if (round == spins + 1) demand_.note_first_yield(now);
}

// Yields the core several times, on a host with more ranks than cores, until a message may have arrived. While this
// rank yields, the other ranks fill the caches with their data. So between two yields it reads only the cache lines
// where a message would arrive. If no other thread has run meanwhile, yields reach no rank, because the others run on
// other cores, sleep, or belong to sessions of their own. Then this rank soon sleeps.
void Endpoint::yield_in_crowd(Idle& idle) {
  const std::vector<Blocked> waits = blocked();
  const auto may_progress = [](const Blocked& on) {
    return on.channel == nullptr || on.channel->may_progress(on.sends, on.receives);
  };
  auto now = idle.checked_at;
  for (std::uint32_t turn = 0; turn < yields_between_looks && yields_help(); ++turn) {
    now = demand_.yield(now);
    if (std::any_of(waits.begin(), waits.end(), may_progress)) return;
  }
  if (!demand_.another_has_run()) idle.rounds += omitted_rounds;
}

void Endpoint::run_periodic_checks(Idle& idle) {
  const auto now = idle.checked_at = Clock::now();
  demand_.refresh(now);
  if (now < next_check_) return;
  next_check_ = now + check_period;
  if (current_ != nullptr) {
    if (!current_->idle_since_) current_->idle_since_ = now;
    report_slow(*current_, now);
    if (now - *current_->idle_since_ >= current_->next_report_) {
      current_->next_report_ =
          current_->next_report_ < second_report ? second_report : current_->next_report_ + report_period;
      control_->report_blocked(communicator_, members_, current_->sequence_);
    }
  }
  for (Request* request : messages_) report_slow(*request, now);
  record_waits(idle, now);
  report_silent(now);
  check_deadlines(now);
}

// Records the peer for which the call in progress waits, in the flight recorder, and adds the time of waiting to the
// traffic counters of the channel with that peer.
void Endpoint::record_waits(Idle& idle, Clock::time_point now) {
  const std::vector<Blocked> waits = blocked();
  const auto first = std::find_if(waits.begin(), waits.end(), [](const Blocked& on) { return on.needed; });
  if (current_ != nullptr && current_->record_)
    control_->recorder().wait(*current_->record_, first == waits.end() ? -1 : job_rank(first->peer));
  const auto since = std::exchange(idle.counted_until, now);
  if (since != Clock::time_point{} && first != waits.end() && first->channel != nullptr)
    first->channel->add_wait(now - since);
}

// All requests with a deadline, begun or not.
std::vector<Request*> Endpoint::pending() const {
  std::vector<Request*> requests(messages_);
  if (current_ != nullptr) requests.push_back(current_);
  if (queued_.load() != 0) {
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
  if (request.reported_late_for_ != request.deadline_) report_late(request);
  if (time >= request.deadline_) time_out(request);
}

std::chrono::microseconds Endpoint::time_to_next_deadline() const {
  auto next = Clock::time_point::max().time_since_epoch().count();
  for (const Request* request : pending())
    next = std::min(next, request->reported_late_for_ == request->deadline_ ? request->deadline_.load()
                                                                            : request->late_from_.load());
  const auto remaining = Clock::duration(next) - Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(std::max(remaining, Clock::duration::zero()));
}

// Asks the judges why a call does not end. Their last answer before the deadline becomes part of its error.
void Endpoint::report_late(Request& request) {
  request.reported_late_for_ = request.deadline_;
  ask_judges(request, Clock::time_point{Clock::duration(request.reported_late_for_)});
}

void Endpoint::ask_judges(const Request& request, Clock::time_point deadline) {
  if (request.call_ != nullptr)
    control_->report_late(communicator_, members_, current_sequence(), -1, -1, deadline);
  else
    control_->report_late(communicator_, members_, -1, request.number_, peer_of(request), deadline);
}

// Reports a call that takes long, once, with the reason that the judges give. It does not fail. A message without a
// time limit is one that the program awaits at all times, as a server awaits requests, so it is never reported, and
// the recorder does not count it as the call that the rank is in.
void Endpoint::report_slow(Request& request, Clock::time_point now) {
  if (request.call_ == nullptr && std::isinf(request.timeout_s_.load())) {
    if (request.slow_ == Request::Slow::no && request.record_)
      control_->recorder().listen(*request.record_, communicator_, static_cast<std::uint64_t>(request.number_));
    request.slow_ = Request::Slow::reported;
    return;
  }
  if (!request.idle_since_) request.idle_since_ = now;
  const auto limit = control_->slow_after();
  const auto time = now - *request.idle_since_;
  if (request.slow_ == Request::Slow::no && time >= limit - std::min<Clock::duration>(limit / 2, most_asking_time)) {
    request.slow_ = Request::Slow::asked;
    ask_judges(request, *request.idle_since_ + limit);
  } else if (request.slow_ == Request::Slow::asked && time >= limit) {
    request.slow_ = Request::Slow::reported;
    const double seconds = std::chrono::duration<double>(limit).count();
    const bool is_call = request.call_ != nullptr;
    const Outlook outlook = control_->outlook(communicator_, is_call ? current_sequence() : -1, request.number_);
    control_->notify("rank " + std::to_string(rank()) + " has waited " + seconds_text(seconds) + outlook.text,
                     !is_call || is_first_waiting(outlook.peer));
  }
}

// Whether this is the lowest rank of the communicator that waits, if all but `awaited` do.
bool Endpoint::is_first_waiting(std::int32_t awaited) const {
  const std::int32_t first = job_rank(0);
  return rank() == (first != awaited || size() == 1 ? first : job_rank(1));
}

// Sleeps until a channel can make progress, the doorbell rings, a signal arrives, or a periodic check is due.
void Endpoint::sleep(Idle& idle, bool serving) {
  std::vector<pollfd> descriptors{{doorbell_.get(), POLLIN, 0}};
  if (awaited_verdict_ || check_closed()) {
    // While the judges decide, or when a channel that the call needs has closed, only the control links bring news, and
    // they ring the doorbell. The descriptors of closed channels would wake this thread at once.
    if (!control_->failed()) ::poll(descriptors.data(), 1, static_cast<int>(longest_sleep.count()));
    doorbell_.drain();
    return;
  }
  std::vector<Blocked> waits = blocked();
  // The descriptors of a channel whose peer has gone would wake this thread at once.
  std::erase_if(waits, [this](const Blocked& on) { return on.listens && peer_has_gone(on); });
  for (const Blocked& on : waits)
    if (on.channel != nullptr) on.channel->prepare_sleep(on.sends, on.receives, descriptors);
  if (!serving) set_short_turns(!yields_help());
  asleep_ = true;
  heavy_fence();
  const bool moved = drive();
  if (!moved && !must_stay_awake(serving)) {
    std::chrono::microseconds most = std::min<std::chrono::microseconds>(longest_sleep, time_to_next_deadline());
    for (const Blocked& on : waits)
      if (on.channel != nullptr) most = std::min(most, on.channel->max_sleep());
    const timespec time{0, std::chrono::nanoseconds(most).count()};
    ::ppoll(descriptors.data(), descriptors.size(), &time, nullptr);
    doorbell_.drain();
  }
  asleep_ = false;
  for (const Blocked& on : waits)
    if (on.channel != nullptr) on.channel->cancel_sleep();
  if (moved) idle.note_progress();
}

// Whether there is work for which the doorbell may have been rung before this thread announced its sleep.
bool Endpoint::must_stay_awake(bool serving) const {
  if (closed_ || control_->failed() || leadership_->is_urgent() || has_startable_call()) return true;
  return serving && (leadership_->is_requested() || background_count_.load() == 0);
}

// Whether a queued request need not wait for the running collective.
bool Endpoint::has_startable_call() const {
  if (queued_.load() == 0) return false;
  const std::lock_guard lock(mutex_);
  return !new_messages_.empty() || (current_ == nullptr && !collectives_.empty());
}

std::vector<Blocked> Endpoint::blocked() const {
  std::vector<Blocked> waits;
  if (current_ != nullptr) collective_.blocked_on(waits);
  for (const auto& [place, mailbox] : mailboxes_) mailbox->blocked_on(waits);
  return waits;
}

bool Endpoint::peer_has_gone(const Blocked& on) const {
  if (on.channel != nullptr) return on.channel->closed();
  return control_->opens_no_more(job_rank(on.peer));
}

// Returns a peer that has gone and that a waiting operation needs. If all peers have gone from which a receive from any
// rank could get a message, returns one of them.
std::optional<std::int32_t> Endpoint::needed_and_gone(const std::vector<Blocked>& waits) const {
  auto lost =
      std::find_if(waits.begin(), waits.end(), [this](const Blocked& on) { return on.needed && peer_has_gone(on); });
  // A receive from any rank is posted for each of them.
  const auto may_come = [this](const Blocked& on) { return on.receives && !peer_has_gone(on); };
  if (lost == waits.end() && std::none_of(waits.begin(), waits.end(), may_come))
    lost = std::find_if(waits.begin(), waits.end(), [](const Blocked& on) { return !on.needed && !on.listens; });
  return lost == waits.end() ? std::nullopt : std::optional(job_rank(lost->peer));
}

// Returns whether a waiting operation needed a peer that has gone. First it reads the last messages that the peer had
// sent. Then it looks at the operations again, because they may have ended, or a channel may have been added meanwhile.
bool Endpoint::check_closed() {
  if (!needed_and_gone(blocked())) return false;
  if (drive() || control_->failed()) return true;
  const std::vector<Blocked> waits = blocked();
  if (const auto peer = needed_and_gone(waits)) {
    const std::string reason = "rank " + std::to_string(*peer) + " closed its connection";
    control_->suspect(*peer, communicator_, current_sequence(), reason);
    report_broken(waits);
  }
  return true;
}

// Asks for another connection in place of each broken one, because the peer may still live.
void Endpoint::report_broken(const std::vector<Blocked>& waits) {
  const auto now = Clock::now();
  if (now < next_loss_report_) return;
  next_loss_report_ = now + loss_report_period;
  std::vector<LostConnection> lost;
  for (const Blocked& on : waits) {
    if (on.channel == nullptr) continue;
    for (const BrokenStream& stream : on.channel->broken())
      lost.push_back({communicator_, on.channel->lane(), job_rank(on.channel->peer()), stream});
  }
  if (!lost.empty()) control_->lost_connections(lost);
}

// Asks for another connection in place of each silent one (silence.h). The rank does not suspect the peers, because the
// silent connections may still recover. It looks at all channels: a call may wait for one peer because another one
// lacks a message that was sent long ago.
void Endpoint::report_silent(Clock::time_point now) {
  if (now < next_look_ || !polls_by_syscall_.load(std::memory_order_relaxed)) return;
  next_look_ = now + control_->look_period();
  std::vector<LostConnection> silent;
  channels_.for_each([&](Channel& channel) {
    for (const BrokenStream& stream : channel.silent(now, control_->silent_after()))
      silent.push_back({communicator_, channel.lane(), job_rank(channel.peer()), stream});
  });
  if (!silent.empty()) control_->lost_connections(silent);
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

// Returns the other end of a message as a rank of the job; -1 for a receive from any rank.
std::int32_t Endpoint::peer_of(const Request& request) const {
  const auto& peer = request.message_->peer;
  return peer ? job_rank(*peer) : -1;
}

}  // namespace unisono
