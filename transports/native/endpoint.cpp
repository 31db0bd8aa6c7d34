#include "endpoint.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <thread>
#include <utility>

#include "fence.h"

namespace unisono {
namespace {

using namespace std::chrono_literals;

// Rounds without progress that a waiting rank spins, and then yields, before it sleeps.
constexpr std::uint32_t spin_rounds = 300;
constexpr std::uint32_t yield_rounds = 300;
constexpr std::uint32_t crowded_yield_rounds = 30;
// How often a spinning rank looks at the clock.
constexpr std::uint32_t rounds_per_look = 128;
constexpr auto blocked_after = 10ms;
constexpr auto signal_check_period = 20ms;
constexpr auto longest_sleep = 20ms;
// How long a rank waits for the hub's word before it speaks for itself.
constexpr auto verdict_time = 2500ms;
constexpr auto departure_time = 300ms;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

}  // namespace

// The mutex of the endpoint is taken in any case: another thread may just be ending this request.
Request::~Request() { endpoint_.withdraw(*this); }

Endpoint::Endpoint(std::shared_ptr<Control> control, std::uint64_t communicator, bool crowded,
                   std::vector<std::int32_t> members)
    : control_(std::move(control)),
      communicator_(communicator),
      crowded_(crowded),
      members_(std::move(members)),
      channels_(size()) {
  if (!members_.empty()) control_->recorder().name(communicator_, " in " + ranks_text(members_));
  control_->add_doorbell(doorbell_.get());
}

Endpoint::~Endpoint() {
  if (!control_->abandoned()) close();
}

std::int32_t Endpoint::job_rank(std::int32_t member) const {
  return members_.empty() ? member : members_.at(static_cast<std::size_t>(member));
}

std::int32_t Endpoint::member(std::int32_t job_rank) const {
  if (members_.empty()) return job_rank;
  const auto found = std::find(members_.begin(), members_.end(), job_rank);
  if (found == members_.end()) throw std::invalid_argument("this rank of the job is not in the communicator");
  return static_cast<std::int32_t>(found - members_.begin());
}

void Endpoint::add_channel(std::int64_t lane, std::unique_ptr<Channel> channel) {
  channels_.add(lane, std::move(channel));
  doorbell_.ring();
}

std::vector<ChannelTraffic> Endpoint::traffic() const {
  const std::lock_guard lock(mutex_);
  std::vector<ChannelTraffic> rows;
  for (const Channel* channel : channels_.all())
    rows.push_back({channel->peer(), channel->transport(), channel->counters()});
  return rows;
}

void Endpoint::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  control_->remove_doorbell(doorbell_.get());
  doorbell_.ring();  // for threads that sleep in a call
  for (Request* request : std::exchange(collectives_, {})) finish(*request, Outcome::failed);
  for (const auto& [key, mailbox] : mailboxes_) mailbox->close();
  mailboxes_.clear();
  channels_.clear();
}

std::unique_ptr<Request> Endpoint::start(const CompiledCall& call, const Memory& memory, const CallSite& site) {
  return start_and_spin(call, memory, site, 0);
}

std::unique_ptr<Request> Endpoint::start_and_spin(const CompiledCall& call, const Memory& memory, const CallSite& site,
                                                  std::uint32_t rounds) {
  auto request = std::unique_ptr<Request>();
  const std::lock_guard lock(mutex_);  // after the request, whose end takes it too
  const std::uint32_t sequence = next_sequence_++;
  const std::size_t record = control_->recorder().begin(communicator_, sequence, call.digest, call.description, site);
  const bool refused = closed_ || control_->failed();
  std::exception_ptr error;
  if (!refused) {
    if (!spare_collective_) spare_collective_ = std::make_unique<Collective>();
    spare_collective_->start(call, memory, sequence, channels_);
    if (collectives_.empty() && spin(*spare_collective_, rounds, error)) {
      control_->recorder().end(record);
      return nullptr;
    }
  }
  request = std::make_unique<Request>(*this);
  request->record_ = record;
  request->sequence_ = sequence;
  if (refused) {
    finish(*request, Outcome::failed);
    return request;
  }
  request->error_ = std::move(error);
  request->operation_ = std::move(spare_collective_);
  collectives_.push_back(request.get());
  return request;
}

// With the mutex held. Looks for progress `rounds` times; true if the collective has ended. What goes wrong is kept in
// `error`.
bool Endpoint::spin(Collective& collective, std::uint32_t rounds, std::exception_ptr& error) {
  try {
    for (; rounds != 0; --rounds) {
      collective.advance();
      if (collective.done()) return true;
    }
  } catch (const std::runtime_error&) {
    error = std::current_exception();
  }
  return false;
}

std::unique_ptr<Request> Endpoint::send(std::int32_t peer, DType dtype, std::uint32_t tag, std::byte* data,
                                        std::size_t nbytes, const CallSite& site) {
  const Header header{0, nbytes, static_cast<std::uint32_t>(dtype), tag, 0, kind_point_to_point};
  return point_to_point(peer, {header, data}, true, "send(dest=", site);
}

std::unique_ptr<Request> Endpoint::receive(std::int32_t peer, DType dtype, std::uint32_t tag, std::byte* data,
                                           std::size_t nbytes, const CallSite& site) {
  const Header header{0, nbytes, static_cast<std::uint32_t>(dtype), tag, 0, kind_point_to_point};
  return point_to_point(peer, {header, data}, false, "recv(source=", site);
}

std::unique_ptr<Request> Endpoint::point_to_point(std::int32_t peer, const Parcel& parcel, bool sends, const char* verb,
                                                  const CallSite& site) {
  auto request = std::make_unique<Request>(*this);
  const std::lock_guard lock(mutex_);  // after the request, whose end takes it too
  auto description = std::make_shared<const std::string>(verb + std::to_string(peer) +
                                                         ", tag=" + std::to_string(parcel.header.group) + ")");
  request->record_ =
      control_->recorder().begin(communicator_ | point_to_point_record, next_point_to_point_++, 0, description, site);
  if (closed_ || control_->failed()) {
    finish(*request, Outcome::failed);
    return request;
  }
  const std::int64_t lane = sends ? ChannelTable::sending_lane : ChannelTable::receiving_lane;
  ChannelEntry& entry = channels_.at(lane, peer);
  auto& mailbox = mailboxes_[{lane, peer}];
  if (!mailbox) mailbox = std::make_shared<Mailbox>(entry);
  try {
    request->operation_ = std::make_unique<PointToPoint>(mailbox, parcel, sends);
  } catch (const Mismatch& found) {  // with a message that had come before
    mismatch(found);
    finish(*request, Outcome::failed);
  }
  return request;
}

void Endpoint::withdraw(Request& request) {
  if (control_->abandoned()) return;
  const std::lock_guard lock(mutex_);
  if (request.operation_ == nullptr) return;  // it has ended, or was never started
  control_->fail({FailureKind::aborted, rank(), -1, request.sequence_,
                  "rank " + std::to_string(rank()) + " dropped a call that had not ended"});
  std::erase(collectives_, &request);
  finish(request, Outcome::failed);
}

void Endpoint::finish(Request& request, Outcome outcome) {
  request.outcome_ = outcome;
  control_->recorder().end(request.record_);
  if (request.sequence_ >= 0 && request.operation_)
    spare_collective_.reset(static_cast<Collective*>(request.operation_.release()));
  request.operation_.reset();
}

// With the mutex held. Moves what can be moved for the request, and ends it if it is over.
bool Endpoint::advance(Request& request) {
  try {
    if (request.error_) std::rethrow_exception(std::exchange(request.error_, nullptr));
    if (request.sequence_ >= 0) return advance_collectives();
    const bool moved = advance_messages();
    if (request.operation_->done()) finish(request, Outcome::done);
    return moved;
  } catch (const Mismatch& found) {
    mismatch(found);
  } catch (const ProtocolError& error) {
    control_->fail({FailureKind::internal, rank(), -1, driven_for(request).sequence_, error.what()});
  }
  return false;
}

bool Endpoint::advance_collectives() {
  bool moved = false;
  while (!collectives_.empty()) {
    Request& front = *collectives_.front();
    moved |= front.operation_->advance();
    if (!front.operation_->done()) break;
    collectives_.pop_front();
    finish(front, Outcome::done);
    moved = true;
  }
  return moved;
}

// Whichever message is waited for, those started before it move on: the peer may be waiting for one of them.
bool Endpoint::advance_messages() {
  bool moved = false;
  for (const auto& [place, mailbox] : mailboxes_)
    if (mailbox->advance()) moved = true;
  return moved;
}

std::vector<Blocked> Endpoint::blocked_messages() const {
  std::vector<Blocked> found;
  for (const auto& [place, mailbox] : mailboxes_) mailbox->blocked_on(found);
  return found;
}

Outcome Endpoint::poll(Request& request) {
  const std::lock_guard lock(mutex_);
  if (request.outcome_ == Outcome::pending) advance(request);
  if (request.outcome_ == Outcome::pending) check_closed(request);
  give_up_if_failed(request);
  return request.outcome_;
}

Outcome Endpoint::wait(Request& request, double timeout_s, Interrupted interrupted) {
  Waiting waiting{timeout_s};
  for (;;) {
    bool moved = false;
    {
      const std::lock_guard lock(mutex_);
      if (request.outcome_ == Outcome::pending) moved = advance(request);
      give_up_if_failed(request);
      if (request.outcome_ != Outcome::pending) return request.outcome_;
    }
    if (moved) {
      waiting.idle = 0;
    } else if (!rest(request, waiting, interrupted)) {
      control_->fail({FailureKind::aborted, rank(), rank(), request.sequence_,
                      "rank " + std::to_string(rank()) + " was interrupted"});
      const std::lock_guard lock(mutex_);
      std::erase(collectives_, &request);
      finish(request, Outcome::failed);
      return Outcome::interrupted;
    }
  }
}

// Passes the time until it makes sense to look for progress again. False if the program wants to stop waiting.
bool Endpoint::rest(Request& request, Waiting& waiting, Interrupted interrupted) {
  const std::uint32_t spins = crowded_ ? 0 : spin_rounds;
  const std::uint32_t yields = crowded_ ? crowded_yield_rounds : yield_rounds;
  if (waiting.started == Clock::time_point{}) waiting.started = Clock::now();
  const std::uint32_t round = ++waiting.idle;
  if (round <= spins) {
    relax();
    return round % rounds_per_look != 0 || look_around(request, waiting, interrupted);
  }
  if (!look_around(request, waiting, interrupted)) return false;
  if (round <= spins + yields) {
    ::sched_yield();
    return true;
  }
  {
    const std::lock_guard lock(mutex_);
    check_closed(request);
  }
  sleep(request, waiting);
  return true;
}

bool Endpoint::look_around(Request& request, Waiting& waiting, Interrupted interrupted) {
  const auto now = Clock::now();
  if (now >= waiting.next_signal_check) {
    waiting.next_signal_check = now + signal_check_period;
    if (interrupted != nullptr && interrupted()) return false;
  }
  const auto waited = now - waiting.started;
  if (waited >= blocked_after && !waiting.reported && request.sequence_ >= 0) {
    waiting.reported = true;
    control_->report(FrameType::blocked, communicator_, members_, driven_sequence(request), "");
  }
  if (std::chrono::duration<double>(waited).count() >= waiting.timeout_s && !control_->failed())
    time_out(request, waiting);
  return true;
}

// Sleeps until something can move, the doorbell rings, a signal arrives, or the time for looking around has come.
void Endpoint::sleep(Request& request, Waiting& waiting) {
  std::vector<pollfd> descriptors{{doorbell_.get(), POLLIN, 0}};
  std::vector<Blocked> blocked;
  bool moved = false;
  {
    const std::lock_guard lock(mutex_);
    blocked = request.sequence_ >= 0 ? blocked_on(request) : blocked_messages();
    for (const Blocked& on : blocked)
      if (on.channel != nullptr) on.channel->prepare_sleep(on.sends, on.receives, descriptors);
    heavy_fence();
    if (request.outcome_ == Outcome::pending) moved = advance(request);
  }
  if (!moved && !control_->failed()) {
    const int timeout_ms = static_cast<int>(std::chrono::milliseconds(longest_sleep).count());
    const int ready = ::poll(descriptors.data(), descriptors.size(), timeout_ms);
    if (ready < 0 && errno == EINTR) waiting.next_signal_check = {};
    doorbell_.drain();
  }
  const std::lock_guard lock(mutex_);
  if (closed_) return;  // and the channels with it
  for (const Blocked& on : blocked)
    if (on.channel != nullptr) on.channel->cancel_sleep();
  if (moved) waiting.idle = 0;
}

std::int64_t Endpoint::driven_sequence(const Request& request) const {
  const std::lock_guard lock(mutex_);
  return driven_for(request).sequence_;
}

std::vector<Blocked> Endpoint::blocked_on(const Request& request) const {
  std::vector<Blocked> found;
  const Request& driven = driven_for(request);
  if (driven.operation_) driven.operation_->blocked_on(found);
  return found;
}

// Collectives are driven in the order of their calls: the request that must move before this one can.
const Request& Endpoint::driven_for(const Request& request) const {
  return request.sequence_ >= 0 && !collectives_.empty() ? *collectives_.front() : request;
}

// With the mutex held.
void Endpoint::give_up_if_failed(Request& request) {
  if (request.outcome_ != Outcome::pending || !(closed_ || control_->failed())) return;
  std::erase(collectives_, &request);
  finish(request, Outcome::failed);
}

// With the mutex held. A channel on which the request waits and whose peer has gone will bring nothing more once it has
// been read empty.
void Endpoint::check_closed(Request& request) {
  for (const Blocked& on : blocked_on(request)) {
    const bool gone = on.channel != nullptr ? on.channel->closed() : control_->departed(job_rank(on.peer));
    if (!gone) continue;
    if (request.outcome_ == Outcome::pending && !advance(request) && !control_->failed())
      lose(job_rank(on.peer), request);
    return;
  }
}

void Endpoint::lose(std::int32_t peer, const Request& request) {
  const std::string name = "rank " + std::to_string(peer);
  const auto until = Clock::now() + departure_time;
  while (!control_->failed() && !control_->departed(peer) && Clock::now() < until) std::this_thread::sleep_for(1ms);
  const std::string farewell = control_->farewell(peer);
  const std::string how = !control_->departed(peer) ? " closed its connection"
                          : farewell.empty()        ? " has left the communicator"
                                                    : " has left: " + farewell;
  control_->fail({FailureKind::peer_lost, rank(), peer, request.sequence_, name + how});
}

void Endpoint::mismatch(const Mismatch& found) {
  const std::int32_t peer = job_rank(found.peer);
  const std::string text =
      "rank " + std::to_string(rank()) + ": rank " + std::to_string(peer) + " sent " + found.what();
  const Failure otherwise{FailureKind::mismatch, rank(), peer, found.sequence, text};
  if (found.sequence < 0) {
    control_->fail(otherwise);
    return;
  }
  control_->report(FrameType::mismatch, communicator_, members_, found.sequence, text);
  await_verdict(verdict_time, otherwise);
}

void Endpoint::time_out(Request& request, const Waiting& waiting) {
  const std::string text = "rank " + std::to_string(rank()) + " waited " + seconds_text(waiting.timeout_s);
  if (request.sequence_ >= 0) {
    control_->report(FrameType::timed_out, communicator_, members_, request.sequence_, text);
    await_verdict(verdict_time, {FailureKind::timeout, rank(), -1, request.sequence_,
                                 text + " and rank 0, which knows of all, does not answer"});
    return;
  }
  const std::lock_guard lock(mutex_);
  const auto blocked = blocked_on(request);
  if (blocked.empty()) return;
  const std::int32_t peer = job_rank(blocked.front().peer);
  control_->fail({FailureKind::timeout, rank(), peer, -1,
                  text + (blocked.front().sends ? " for room to send to rank " : " for a message from rank ") +
                      std::to_string(peer)});
}

void Endpoint::await_verdict(std::chrono::milliseconds most, Failure otherwise) {
  const auto until = Clock::now() + most;
  while (!control_->failed() && Clock::now() < until) std::this_thread::sleep_for(1ms);
  if (!control_->failed()) control_->fail(std::move(otherwise));
}

}  // namespace unisono
