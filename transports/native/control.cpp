#include "control.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "quiet_thread.h"

namespace unisono {
namespace {

using namespace std::chrono_literals;

// How long the hub waits for what ranks know of a call before it judges without them.
constexpr auto testimony_time = 1000ms;
// How long a farewell may take to be handed to the kernel.
constexpr auto farewell_time = 200ms;
// How long word of why a rank has gone may take to come.
constexpr auto departure_time = 300ms;

// Whether a connection has ended as nothing came from the other end, not even that it has.
bool silent(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN;
}

}  // namespace

Control::Control(std::int32_t rank, std::int32_t size)
    : rank_(rank),
      size_(size),
      links_(static_cast<std::size_t>(size)),
      departures_(static_cast<std::size_t>(size)),
      farewells_(static_cast<std::size_t>(size)) {
  service_ = start_quiet_thread([this] {
    std::unique_lock lock(mutex_);
    serve(lock);
  });
}

Control::~Control() {
  if (!abandoned_) leave("");
}

void Control::add_link(std::int32_t peer, Descriptor socket, Descriptor process) {
  const std::lock_guard lock(mutex_);
  Link& link = links_.at(static_cast<std::size_t>(peer));
  const int flags = ::fcntl(socket.get(), F_GETFL);
  ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK);
  link.socket = std::move(socket);
  link.process = std::move(process);
  link.open = true;
  if (is_hub()) tell_the_past(peer);
  wake_.ring();
}

// Ranks may have left, or failed, before this one had its link.
void Control::tell_the_past(std::int32_t peer) {
  for (std::int32_t gone = 0; gone < size_; ++gone)
    if (departures_[static_cast<std::size_t>(gone)].has_value()) send(peer, farewell_frame(gone));
  if (failed()) send(peer, failure_frame());
}

Frame Control::farewell_frame(std::int32_t peer) const {
  Frame frame;
  frame.type = FrameType::leaving;
  frame.rank = peer;
  frame.text = farewells_[static_cast<std::size_t>(peer)];
  return frame;
}

Frame Control::failure_frame() const {
  Frame frame;
  frame.type = FrameType::failure;
  frame.failure = failure_.kind;
  frame.rank = failure_.rank;
  frame.peer = failure_.peer;
  frame.sequence = failure_.sequence;
  frame.text = failure_.text;
  return frame;
}

std::size_t Control::links() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(std::count_if(links_.begin(), links_.end(), [](const Link& l) { return l.open; }));
}

Failure Control::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Control::fail(Failure failure) {
  const std::lock_guard lock(mutex_);
  set_failure(std::move(failure), rank_);
}

void Control::lose(std::int32_t peer, std::int64_t sequence, const std::string& seen) {
  const auto until = Clock::now() + departure_time;
  while (!failed() && !departed(peer) && Clock::now() < until) std::this_thread::sleep_for(1ms);
  const std::string words = farewell(peer);
  const std::string left =
      "rank " + std::to_string(peer) + " has left" + (words.empty() ? " the communicator" : ": " + words);
  fail({FailureKind::peer_lost, rank_, peer, sequence, departed(peer) ? left : seen});
}

void Control::report(FrameType reason, std::uint64_t communicator, const std::vector<std::int32_t>& members,
                     std::int64_t sequence, const std::string& text) {
  const std::lock_guard lock(mutex_);
  Frame frame;
  frame.type = reason;
  frame.rank = rank_;
  frame.communicator = communicator;
  frame.sequence = sequence;
  frame.text = text;
  frame.members = members;
  if (is_hub())
    inquire(rank_, frame);
  else
    send(0, frame);
  wake_.ring();
}

bool Control::departed(std::int32_t peer) const {
  const std::lock_guard lock(mutex_);
  return departures_.at(static_cast<std::size_t>(peer)).has_value();
}

bool Control::departed_by(std::int32_t peer, std::chrono::steady_clock::time_point time) const {
  const std::lock_guard lock(mutex_);
  const auto& departure = departures_.at(static_cast<std::size_t>(peer));
  return departure && *departure <= time;
}

std::string Control::farewell(std::int32_t peer) const {
  const std::lock_guard lock(mutex_);
  return farewells_.at(static_cast<std::size_t>(peer));
}

void Control::add_doorbell(int doorbell) {
  const std::lock_guard lock(mutex_);
  doorbells_.push_back(doorbell);
}

void Control::remove_doorbell(int doorbell) {
  const std::lock_guard lock(mutex_);
  std::erase(doorbells_, doorbell);
}

void Control::leave(const std::string& farewell) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_) {
      Frame frame;
      frame.type = FrameType::leaving;
      frame.rank = rank_;
      frame.text = farewell;
      send_to_others(-1, frame);
      stopping_ = true;
      wake_.ring();
    }
  }
  if (service_.joinable()) service_.join();
}

void Control::abandon() {
  abandoned_ = true;
  if (service_.joinable()) service_.detach();  // it does not exist here
}

void Control::serve(std::unique_lock<std::mutex>& lock) {
  Clock::time_point give_up = Clock::time_point::max();
  for (;;) {
    for (std::int32_t peer = 0; peer < size_; ++peer) write_link(peer);
    if (stopping_) {
      if (give_up == Clock::time_point::max()) give_up = Clock::now() + farewell_time;
      const bool all_said = std::all_of(links_.begin(), links_.end(), [](const Link& l) { return l.out.empty(); });
      if (all_said || Clock::now() >= give_up) break;
    }
    poll_links(lock);
    for (auto& [communicator, question] : questions_)
      if (!failed() && Clock::now() >= question.deadline) judge(question, true);
  }
  for (Link& link : links_) {
    link.open = false;
    link.socket.reset();
    link.process.reset();
  }
}

int Control::poll_timeout_ms() const {
  if (stopping_) return 10;
  auto earliest = Clock::time_point::max();
  for (const auto& [communicator, question] : questions_) earliest = std::min(earliest, question.deadline);
  if (earliest == Clock::time_point::max() || failed()) return -1;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(earliest - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left + 1, 0, 1000));
}

void Control::poll_links(std::unique_lock<std::mutex>& lock) {
  std::vector<pollfd> descriptors{{wake_.get(), POLLIN, 0}};
  std::vector<std::pair<std::int32_t, bool>> sources{{-1, false}};  // (peer, whether it is the pidfd)
  for (std::int32_t peer = 0; peer < size_; ++peer) {
    const Link& link = links_[static_cast<std::size_t>(peer)];
    if (!link.open) continue;
    descriptors.push_back({link.socket.get(), static_cast<short>(link.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    sources.emplace_back(peer, false);
    if (!link.process.valid()) continue;
    descriptors.push_back({link.process.get(), POLLIN, 0});
    sources.emplace_back(peer, true);
  }
  const int timeout_ms = poll_timeout_ms();
  lock.unlock();
  ::poll(descriptors.data(), descriptors.size(), timeout_ms);
  lock.lock();
  wake_.drain();
  for (std::size_t i = 1; i < descriptors.size(); ++i) {
    if (descriptors[i].revents == 0) continue;
    const auto [peer, is_process] = sources[i];
    read_link(peer);  // what it said last comes before its end
    if (is_process) link_ended(peer);
  }
}

void Control::read_link(std::int32_t peer) {
  Link& link = links_[static_cast<std::size_t>(peer)];
  char buffer[4096];
  while (link.open) {
    const auto got = ::recv(link.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    const int error = got < 0 ? errno : 0;
    if (got <= 0 || !take_bytes(peer, {buffer, static_cast<std::size_t>(got)})) link_ended(peer, error);
  }
}

// False if the bytes are not frames.
bool Control::take_bytes(std::int32_t peer, std::string_view bytes) {
  std::string& in = links_[static_cast<std::size_t>(peer)].in;
  in.append(bytes);
  try {
    for (Frame frame; decode(in, frame);) handle(peer, frame);
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

void Control::write_link(std::int32_t peer) {
  Link& link = links_[static_cast<std::size_t>(peer)];
  while (link.open && !link.out.empty()) {
    const auto put = ::send(link.socket.get(), link.out.data(), link.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put > 0) {
      link.out.erase(0, static_cast<std::size_t>(put));
    } else {
      if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) link.out.clear();
      return;
    }
  }
}

void Control::link_ended(std::int32_t peer, int error) {
  Link& link = links_[static_cast<std::size_t>(peer)];
  if (!link.open) return;
  link.open = false;
  link.out.clear();
  link.socket.reset();
  link.process.reset();
  if (stopping_ || departures_[static_cast<std::size_t>(peer)].has_value()) return;
  const std::string what =
      silent(error) ? " is out of reach: its host or the network has given no sign of life" : " died";
  set_failure({FailureKind::peer_lost, rank_, peer, -1, "rank " + std::to_string(peer) + what}, rank_);
}

void Control::handle(std::int32_t from, const Frame& frame) {
  switch (frame.type) {
    case FrameType::failure:
      set_failure({frame.failure, frame.rank, frame.peer, frame.sequence, frame.text}, from);
      break;
    case FrameType::blocked:
    case FrameType::mismatch:
    case FrameType::timed_out:
      if (is_hub()) inquire(from, frame);
      break;
    case FrameType::query:
      send(from, testify(frame));
      break;
    case FrameType::answer:
      take_testimony(from, frame);
      break;
    case FrameType::leaving:
      note_departure(is_hub() ? from : frame.rank, frame.text);
      break;
  }
}

void Control::send(std::int32_t peer, const Frame& frame) {
  Link& link = links_[static_cast<std::size_t>(peer)];
  if (!link.open) return;
  link.out += encode(frame);
  frames_sent_.fetch_add(1, std::memory_order_relaxed);
  write_link(peer);
  if (!link.out.empty()) wake_.ring();  // the service thread is to wait for room
}

void Control::send_to_others(std::int32_t except, const Frame& frame) {
  for (std::int32_t peer = 0; peer < size_; ++peer)
    if (peer != except) send(peer, frame);
}

void Control::set_failure(Failure failure, std::int32_t told_by) {
  if (failed()) return;
  failure_ = std::move(failure);
  failed_.store(true, std::memory_order_release);
  send_to_others(told_by, failure_frame());
  ring_all();
}

void Control::note_departure(std::int32_t peer, const std::string& farewell) {
  if (peer < 0 || peer >= size_ || departures_[static_cast<std::size_t>(peer)].has_value()) return;
  departures_[static_cast<std::size_t>(peer)] = Clock::now();
  farewells_[static_cast<std::size_t>(peer)] = farewell;
  if (is_hub()) send_to_others(peer, farewell_frame(peer));
  ring_all();
}

void Control::ring_all() const {
  for (const int doorbell : doorbells_) Doorbell::ring(doorbell);
}

Frame Control::testify(const Frame& query) const {
  Frame frame;
  frame.type = FrameType::answer;
  frame.rank = rank_;
  frame.peer = query.peer;
  frame.communicator = query.communicator;
  frame.sequence = query.sequence;
  const auto last = recorder_.last(query.communicator);
  if (const auto found = recorder_.find(query.communicator, static_cast<std::uint64_t>(query.sequence))) {
    frame.state = found->returned ? CallState::returned : CallState::running;
    frame.digest = found->digest;
    frame.text = found->text();
  } else if (!last || last->sequence < static_cast<std::uint64_t>(query.sequence)) {
    frame.state = CallState::not_called;
    const auto running = recorder_.running();
    frame.text = running ? "it is in " + running->text() : last ? "last: " + last->text() : "it has called nothing";
  } else {
    frame.state = CallState::unknown;  // too long ago
  }
  return frame;
}

// The first report of a call starts an inquiry into it, and so does a graver one; all ranks are asked. A further report
// that a call is blocked only adds what its reporter knows, and does not displace a graver one.
void Control::inquire(std::int32_t reporter, const Frame& report) {
  if (failed()) return;
  Frame query;
  query.type = FrameType::query;
  query.communicator = report.communicator;
  query.sequence = report.sequence;
  const auto known = questions_.find(report.communicator);
  if (known != questions_.end() && report.type == FrameType::blocked) {
    const Inquiry& open = known->second.inquiry;
    query.peer = known->second.round;
    if (open.sequence == report.sequence) ask(reporter, query);
    if (open.sequence == report.sequence || open.reason != FrameType::blocked) return;
  }
  Question question;
  query.peer = question.round = ++rounds_;
  question.inquiry = {report.communicator,           report.sequence, report.type, reporter, report.text,
                      testimonies_of(report.members)};
  question.deadline = Clock::now() + testimony_time;
  const auto asked = question.inquiry.ranks;
  questions_.insert_or_assign(report.communicator, std::move(question));
  for (std::int32_t peer = 0; peer < size_; ++peer)
    if (asked[static_cast<std::size_t>(peer)].state == CallState::unknown) ask(peer, query);
}

std::vector<Testimony> Control::testimonies_of(const std::vector<std::int32_t>& members) const {
  const CallState all = members.empty() ? CallState::unknown : CallState::outside;
  std::vector<Testimony> ranks(static_cast<std::size_t>(size_), Testimony{all, 0, ""});
  for (const std::int32_t member : members)
    if (member >= 0 && member < size_) ranks[static_cast<std::size_t>(member)].state = CallState::unknown;
  return ranks;
}

void Control::ask(std::int32_t peer, const Frame& query) {
  if (peer == rank_)
    take_testimony(rank_, testify(query));
  else
    send(peer, query);
}

void Control::take_testimony(std::int32_t from, const Frame& frame) {
  const auto known = questions_.find(frame.communicator);
  if (failed() || known == questions_.end() || known->second.round != frame.peer) return;
  auto& ranks = known->second.inquiry.ranks;
  Testimony& own = ranks[static_cast<std::size_t>(from)];
  if (own.state == CallState::outside) return;
  own = {frame.state, frame.digest, frame.text};
  for (std::int32_t peer = 0; peer < size_; ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    if (departures_[index].has_value() && ranks[index].state == CallState::unknown)
      ranks[index] = {CallState::left, 0, farewells_[index]};
  }
  judge(known->second, false);
}

void Control::judge(Question& question, bool final) {
  if (auto found = question.inquiry.verdict(final)) set_failure(std::move(*found), rank_);
  if (final) question.deadline = Clock::time_point::max();
}

}  // namespace unisono
