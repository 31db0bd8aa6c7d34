#include "control/control.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <utility>

#include "system/signal_masked_thread.h"

namespace unisono {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t judge_count = 2;
// How long the farewell may take to reach the kernel.
constexpr auto farewell_time = 200ms;
// How long the reason for a rank's end may take to arrive.
constexpr auto departure_time = 500ms;
// The outlooks (diagnosis.h) of the hub go before those of the stand-in, until they are this old.
constexpr auto outlook_time = 300ms;
// A rank asks the judges twice about a late call: for its warning, and for its error. Their first answer also serves
// the error until the second one arrives, but only for this long.
constexpr auto recent_time = 5s;
// If a judge sends no outlook on a late call for this long, the rank counts the judge as silent.
constexpr auto silence_time = 50ms;
// At most this many outlooks of late calls are kept.
constexpr std::size_t most_outlooks = 256;
// Notices that nobody takes, as at exit, are dropped.
constexpr std::size_t most_notices = 64;
// How long a channel may take to be added here after its other end has departed: as long as a crowded host may take to
// run a thread.
constexpr auto admission_time = 30s;
// The limit in place of `admission_time` if the number of channels is unknown, because the farewell came from a new
// judge.
constexpr auto usual_admission_time = 300ms;
// At most this many bytes of frames wait for a peer that does not read them, for example because it is stopped. More
// frames are dropped.
constexpr std::size_t most_unsent_nbytes = 16 << 20;
constexpr auto interrupt_check_period = 20ms;
// A rank asks for the clock of rank 0 this many times and keeps the shortest round trip, because other work of the two
// service threads delays some answers.
constexpr int clock_questions = 16;
// After a reset, a control link has at least this long to continue over another connection. If only one end has noticed
// the reset, the heartbeats of the other end's kernel detect it within a second.
constexpr auto least_resumption_time = 1500ms;
// A silent connection is dialled again after this time, or after a third of the time until its peer is lost.
constexpr auto most_silent_time = 1000ms;
// The number of times that a link is examined until its silent peer counts as lost, and the longest time between two of
// them.
constexpr int looks = 12;
constexpr auto longest_look_period = 1000ms;

bool is_local(int socket) {
  sockaddr_storage address{};
  socklen_t nbytes = sizeof address;
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &nbytes) != 0 || address.ss_family == AF_UNIX;
}

// Whether a connection broke because the other end sent nothing, not even its end.
bool silent(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN;
}

std::string departure_text(std::int32_t rank, const std::string& farewell) {
  return ranks_text({rank}) + " has left" + (farewell.empty() ? " the communicator" : ": " + farewell);
}

std::int64_t now_ns() { return std::chrono::nanoseconds(Control::Clock::now().time_since_epoch()).count(); }

}  // namespace

Control::Control(std::int32_t rank, std::int32_t size, std::size_t recorded, Clock::duration slow_after,
                 Clock::duration lost_after)
    : rank_(rank),
      size_(size),
      recorder_(rank, size, recorded),
      slow_after_(slow_after),
      lost_after_(lost_after),
      links_(static_cast<std::size_t>(size)),
      departures_(static_cast<std::size_t>(size)),
      farewells_(static_cast<std::size_t>(size)),
      channels_(static_cast<std::size_t>(size)),
      judge_(size, [this](std::int32_t peer, const Frame& frame) { deliver(peer, frame); }) {
  channels_.at(static_cast<std::size_t>(rank)).assign(static_cast<std::size_t>(size), 0);
  service_ = start_signal_masked_thread([this] {
    std::unique_lock lock(mutex_);
    serve(lock);
  });
}

Control::~Control() {
  if (!abandoned_) leave("");
}

void Control::add_link(std::int32_t peer, Connection connection, Descriptor process) {
  const std::lock_guard lock(mutex_);
  Link& link = links_.at(static_cast<std::size_t>(peer));
  link.crosses_hosts = !is_local(connection.socket.get());
  link.stream.emplace(std::move(connection), 0);
  link.process = std::move(process);
  if (link.crosses_hosts) next_look_ = std::min(next_look_, Clock::now() + look_period());
  send_past_events(peer);
  if (link.stream->may_have_data()) read_link(peer);  // TLS has read it together with its handshake
  wake_.ring();
}

// Ranks may have departed, or the job may have failed, before this link existed.
void Control::send_past_events(std::int32_t peer) {
  for (std::int32_t rank = 0; rank < size_; ++rank)
    if (rank != peer && departures_[static_cast<std::size_t>(rank)]) send(peer, farewell_frame(rank, peer));
  if (failed()) send(peer, failure_frame());
}

// Returns the frame that announces a departure to `reader`, with the number of channels between the two. A departing
// rank sends the judges its numbers for all ranks, because the judges write to the other ranks.
Frame Control::farewell_frame(std::int32_t departed, std::int32_t reader) const {
  Frame frame;
  frame.type = FrameType::leaving;
  frame.rank = departed;
  frame.text = farewells_[static_cast<std::size_t>(departed)];
  const auto& channels = channels_[static_cast<std::size_t>(departed)];
  if (!channels.empty()) frame.number = channels[static_cast<std::size_t>(reader)];
  const auto judges = current_judges();
  if (departed == rank_ && std::find(judges.begin(), judges.end(), reader) != judges.end()) frame.members = channels;
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
  return static_cast<std::size_t>(
      std::count_if(links_.begin(), links_.end(), [](const Link& l) { return l.stream.has_value(); }));
}

std::vector<std::int32_t> Control::judges() const {
  const std::lock_guard lock(mutex_);
  return current_judges();
}

std::vector<std::int32_t> Control::current_judges() const {
  std::vector<std::int32_t> lowest;
  for (std::int32_t rank = 0; rank < size_ && lowest.size() < judge_count; ++rank)
    if (!departures_[static_cast<std::size_t>(rank)]) lowest.push_back(rank);
  return lowest;
}

bool Control::is_hub() const {
  const auto first =
      std::find_if(departures_.begin(), departures_.end(), [](const auto& departure) { return !departure; });
  return first - departures_.begin() == rank_;
}

Failure Control::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Control::fail(Failure failure) {
  const std::lock_guard lock(mutex_);
  set_failure(std::move(failure), rank_);
}

void Control::suspect(std::int32_t peer, std::uint64_t communicator, std::int64_t sequence, const std::string& reason,
                      bool needed) {
  const std::lock_guard lock(mutex_);
  const bool is_known = std::any_of(suspicions_.begin(), suspicions_.end(), [=](const Suspicion& suspicion) {
    return suspicion.peer == peer && suspicion.needed >= needed;
  });
  if (failed() || is_known) return;
  const auto resuming = resuming_.find(peer);
  const auto until = resuming == resuming_.end() ? Clock::time_point{} : resuming->second;
  suspicions_.push_back({peer, communicator, sequence, reason, std::max(until, Clock::now() + departure_time), needed});
  resolve_suspicions(Clock::now());
  wake_.ring();
}

void Control::trust(std::int32_t peer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(suspicions_, [=](const Suspicion& suspicion) { return suspicion.peer == peer; });
  resuming_.erase(peer);
}

// Only the first attempt to continue a channel extends the time of a suspicion. Further attempts do not, because a peer
// that has left the communicator refuses every one of them.
void Control::expect_resumption(std::int32_t peer) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  const auto [entry, is_first] = resuming_.try_emplace(peer, now + resumption_time());
  const bool is_suspected = std::any_of(suspicions_.begin(), suspicions_.end(),
                                        [=](const Suspicion& suspicion) { return suspicion.peer == peer; });
  if (!is_first && entry->second < now && !is_suspected) entry->second = now + resumption_time();
  for (Suspicion& suspicion : suspicions_)
    if (suspicion.peer == peer) suspicion.until = std::max(suspicion.until, entry->second);
}

void Control::give_up_resumption(std::int32_t peer) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  resuming_[peer] = now;  // the peer may try again and again, and gets no further time for that
  for (Suspicion& suspicion : suspicions_)
    if (suspicion.peer == peer) suspicion.until = std::min(suspicion.until, now + departure_time);
  wake_.ring();
}

Control::Clock::duration Control::silent_after() const {
  return std::min<Clock::duration>(most_silent_time, lost_after_ / 3);
}

Control::Clock::duration Control::look_period() const {
  return std::min<Clock::duration>(longest_look_period, lost_after_ / looks);
}

Control::Clock::duration Control::resumption_time() const {
  return std::max<Clock::duration>(least_resumption_time, lost_after_);
}

void Control::forget_suspicions(std::uint64_t communicator) {
  const std::lock_guard lock(mutex_);
  std::erase_if(suspicions_, [=](const Suspicion& suspicion) { return suspicion.communicator == communicator; });
}

void Control::lost_connections(const std::vector<LostConnection>& lost) {
  const std::lock_guard lock(mutex_);
  if (lost_connections_.size() >= most_notices) return;  // they are reported again
  lost_connections_.insert(lost_connections_.end(), lost.begin(), lost.end());
  ring_all();
}

std::vector<LostConnection> Control::take_lost_connections() {
  const std::lock_guard lock(mutex_);
  return std::exchange(lost_connections_, {});
}

void Control::lose(std::int32_t peer, std::int64_t sequence, const std::string& reason) {
  suspect(peer, control_links, sequence, reason);
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, 2 * departure_time, [this] { return failed(); });
}

void Control::resolve_suspicions(Clock::time_point now) {
  std::erase_if(suspicions_, [this](const Suspicion& suspicion) {
    return !suspicion.needed && departures_[static_cast<std::size_t>(suspicion.peer)].has_value();
  });
  for (const Suspicion& suspicion : suspicions_) {
    if (auto failure = failure_of(suspicion, now)) {
      set_failure(std::move(*failure), rank_);
      break;
    }
  }
  if (failed()) suspicions_.clear();
}

// Returns the failure that a suspicion has become: once the suspected rank has departed, or its time has passed. A rank
// that departs without the text of an error is often only a consequence: it departs after the rank whose error has
// ended its call. So if another rank has departed earlier with a text, that one is the lost rank.
std::optional<Failure> Control::failure_of(const Suspicion& suspicion, Clock::time_point now) const {
  const auto index = static_cast<std::size_t>(suspicion.peer);
  if (!departures_[index] && now < suspicion.until) return std::nullopt;
  std::int32_t lost = suspicion.peer;
  if (farewells_[index].empty()) {
    const std::int32_t first = first_departure_with_reason();
    if (first >= 0 && (!departures_[index] || departures_[static_cast<std::size_t>(first)] < departures_[index]))
      lost = first;
  }
  const auto lost_index = static_cast<std::size_t>(lost);
  const std::string text = departures_[lost_index] ? departure_text(lost, farewells_[lost_index]) : suspicion.reason;
  return Failure{FailureKind::peer_lost, rank_, lost, suspicion.sequence, text};
}

std::int32_t Control::first_departure_with_reason() const {
  std::int32_t first = -1;
  for (std::int32_t rank = 0; rank < size_; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    if (farewells_[index].empty()) continue;
    if (first < 0 || departures_[index] < departures_[static_cast<std::size_t>(first)]) first = rank;
  }
  return first;
}

Frame Control::report_frame(FrameType type, std::uint64_t communicator, const std::vector<std::int32_t>& members,
                            std::int64_t sequence) const {
  Frame report;
  report.type = type;
  report.rank = rank_;
  report.communicator = communicator;
  report.sequence = sequence;
  report.members = members;
  return report;
}

void Control::report_to(std::size_t most_judges, const Frame& report) {
  auto judges = current_judges();
  judges.resize(std::min(judges.size(), most_judges));
  for (const std::int32_t rank : judges) deliver(rank, report);
  judge(Clock::now());
  wake_.ring();
}

void Control::report_blocked(std::uint64_t communicator, const std::vector<std::int32_t>& members,
                             std::int64_t sequence) {
  const std::lock_guard lock(mutex_);
  report_to(1, report_frame(FrameType::blocked, communicator, members, sequence));
}

void Control::report_mismatch(std::uint64_t communicator, const std::vector<std::int32_t>& members,
                              std::int64_t sequence, const std::string& text) {
  const std::lock_guard lock(mutex_);
  Frame report = report_frame(FrameType::mismatch, communicator, members, sequence);
  report.text = text;
  report_to(judge_count, report);
}

void Control::report_late(std::uint64_t communicator, const std::vector<std::int32_t>& members, std::int64_t sequence,
                          std::int64_t number, std::int32_t waits_for, Clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  const LateCall call{communicator, sequence, number};
  const auto entry = outlooks_.find(call);
  if (entry == outlooks_.end()) {
    if (outlooks_.size() >= most_outlooks)
      outlooks_.erase(std::min_element(outlooks_.begin(), outlooks_.end(),
                                       [](const auto& a, const auto& b) { return a.second.time < b.second.time; }));
    outlooks_.try_emplace(call, JudgedOutlook{{}, size_, now});
  } else if (now - entry->second.time > recent_time) {
    entry->second = {{}, size_, now};
  }
  Frame report = report_frame(FrameType::late, communicator, members, sequence);
  report.number = number;
  report.waits_for = waits_for;
  const auto time_left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - now).count();
  report.time_left_us = static_cast<std::uint64_t>(std::max<std::int64_t>(time_left, 0));
  report_to(judge_count, report);
}

void Control::note_outlook(std::int32_t from, const Frame& frame) {
  const auto entry = outlooks_.find(LateCall{frame.communicator, frame.sequence, frame.number});
  if (entry == outlooks_.end()) return;
  const auto now = Clock::now();
  if (from <= entry->second.judge || now - entry->second.time > outlook_time)
    entry->second = {{frame.peer, frame.text}, from, now};
}

Outlook Control::outlook(std::uint64_t communicator, std::int64_t sequence, std::int64_t number) {
  const std::lock_guard lock(mutex_);
  const auto entry = outlooks_.find(LateCall{communicator, sequence, number});
  const bool has_asked = entry != outlooks_.end();
  if (has_asked && entry->second.judge < size_) return entry->second.outlook;
  std::string why = ": there was no time to ask the other ranks why";
  if (has_asked && Clock::now() - entry->second.time >= silence_time) {
    auto silent_judges = current_judges();
    std::erase(silent_judges, rank_);
    why = ": " + ranks_text(silent_judges) + (silent_judges.size() == 1 ? " does" : " do") + " not answer (stopped?)";
  }
  if (sequence < 0) return {-1, why};
  const auto record = recorder_.find(communicator, static_cast<std::uint64_t>(sequence));
  return {-1, " in call #" + std::to_string(sequence) + (record ? " " + record->text() : "") + why};
}

void Control::settle(std::uint64_t communicator, const std::vector<std::int32_t>& members,
                     std::chrono::milliseconds limit, bool (*interrupted)()) {
  const auto last = recorder_.last(communicator);
  if (!last) return;
  const auto until = Clock::now() + limit;
  const std::pair call(communicator, static_cast<std::int64_t>(last->sequence));
  std::unique_lock lock(mutex_);
  settling_.insert(call);
  Frame report = report_frame(FrameType::closing, communicator, members, call.second);
  report.digest = last->digest;
  report.text = last->text();
  report.time_left_us = static_cast<std::uint64_t>(std::chrono::microseconds(limit).count());
  report_to(judge_count, report);
  const auto is_over = [&] { return failed() || !settling_.contains(call); };
  while (!changed_.wait_until(lock, std::min(until, Clock::now() + interrupt_check_period), is_over)) {
    if (Clock::now() >= until) break;
    lock.unlock();
    const bool stops = interrupted != nullptr && interrupted();
    lock.lock();
    if (stops) break;
  }
  settling_.erase(call);
}

std::optional<ClockOffset> Control::measure_clock(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (rank_ == 0) return ClockOffset{};
  if (!links_[0].stream) return clock_.best;
  clock_.remaining = clock_questions;
  ask_clock();
  changed_.wait_for(lock, limit, [this] { return clock_.remaining == 0 || !links_[0].stream; });
  return clock_.best;
}

void Control::ask_clock() {
  Frame question;
  question.type = FrameType::clock;
  question.rank = rank_;
  question.number = clock_.asked_ns = now_ns();
  send(0, question);
}

void Control::note_time(const Frame& frame) {
  if (clock_.remaining == 0 || frame.number != clock_.asked_ns) return;
  const std::int64_t half_ns = (now_ns() - clock_.asked_ns) / 2;
  const bool is_first = clock_.remaining == clock_questions;
  if (is_first || half_ns < clock_.best->uncertainty_ns) {
    const auto theirs = static_cast<std::uint64_t>(frame.sequence);
    const auto ours = static_cast<std::uint64_t>(clock_.asked_ns + half_ns);
    clock_.best = ClockOffset{static_cast<std::int64_t>(theirs - ours), half_ns};
  }
  if (--clock_.remaining > 0)
    ask_clock();
  else
    changed_.notify_all();
}

bool Control::departed(std::int32_t peer) const {
  const std::lock_guard lock(mutex_);
  return departures_.at(static_cast<std::size_t>(peer)).has_value();
}

void Control::add_channel(std::int32_t peer, const std::function<void()>& add) {
  const std::lock_guard lock(mutex_);  // a farewell counts every channel over which this rank may have sent
  add();
  ++channels_[static_cast<std::size_t>(rank_)].at(static_cast<std::size_t>(peer));
}

bool Control::opens_no_more(std::int32_t peer) const {
  const std::lock_guard lock(mutex_);
  const auto index = static_cast<std::size_t>(peer), own = static_cast<std::size_t>(rank_);
  const auto& departure = departures_.at(index);
  if (!departure) return false;
  const auto since = Clock::now() - *departure;
  const std::int32_t expected = channels_[index].empty() ? -1 : channels_[index][own];
  if (expected < 0) return since >= usual_admission_time;
  return channels_[own][index] >= expected || since >= admission_time;
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
      farewells_[static_cast<std::size_t>(rank_)] = farewell;
      for (std::int32_t peer = 0; peer < size_; ++peer) send(peer, farewell_frame(rank_, peer));
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
      const bool all_sent =
          std::all_of(links_.begin(), links_.end(), [](const Link& l) { return !l.stream || !l.stream->waits(); });
      if (all_sent || Clock::now() >= give_up) break;
    }
    poll_links(lock);
    const auto now = Clock::now();
    resolve_suspicions(now);
    lose_late_links(now);
    if (now >= next_look_) look_at_links(now);
    judge(now);
  }
  for (Link& link : links_) {
    link.stream.reset();
    link.process.reset();
  }
}

void Control::judge(Clock::time_point now) {
  if (failed()) return;
  judge_.tick(now);
  if (auto failure = judge_.take_failure()) set_failure(std::move(*failure), rank_);
}

int Control::poll_timeout_ms() const {
  if (stopping_) return 10;
  if (failed()) return -1;
  auto earliest = std::min(judge_.next_tick(), next_look_);
  for (const Suspicion& suspicion : suspicions_) earliest = std::min(earliest, suspicion.until);
  for (const Link& link : links_) earliest = std::min(earliest, link.ends_at.value_or(earliest));
  if (earliest == Clock::time_point::max()) return -1;
  const auto remaining_ms = std::chrono::duration_cast<std::chrono::milliseconds>(earliest - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(remaining_ms + 1, 0, 1000));
}

void Control::poll_links(std::unique_lock<std::mutex>& lock) {
  std::vector<pollfd> descriptors{{wake_.get(), POLLIN, 0}};
  std::vector<std::pair<std::int32_t, bool>> sources{{-1, false}};  // (peer, whether it is the pidfd)
  for (std::int32_t peer = 0; peer < size_; ++peer) {
    const Link& link = links_[static_cast<std::size_t>(peer)];
    if (!link.stream || link.ends_at) continue;
    descriptors.push_back(
        {link.stream->get(), static_cast<short>(link.stream->waits() ? POLLIN | POLLOUT : POLLIN), 0});
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
    read_link(peer);  // its last frames come before its end
    if (is_process) lose_link(peer);
  }
}

void Control::read_link(std::int32_t peer) {
  Link& link = links_[static_cast<std::size_t>(peer)];
  char buffer[4096];
  while (link.stream && !link.ends_at) {
    std::string_view bytes(reinterpret_cast<const char*>(link.stream->staged().data()), link.stream->staged().size());
    if (!bytes.empty()) {  // from a former connection
      link.stream->take(bytes.size());
    } else if (const auto got = link.stream->receive(reinterpret_cast<std::byte*>(buffer), sizeof buffer)) {
      bytes = {buffer, got};
    } else {
      if (link.stream->ended()) link_ended(peer);
      return;
    }
    if (!take_bytes(peer, bytes)) lose_link(peer);
  }
}

// Handles the frames in `bytes`. Returns false if the bytes are no frames.
bool Control::take_bytes(std::int32_t peer, std::string_view bytes) {
  std::string& in = links_[static_cast<std::size_t>(peer)].in;
  in.append(bytes);
  try {
    for (Frame frame; decode(in, frame);) {
      check_ranks(frame);
      handle(peer, frame);
    }
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

void Control::write_link(std::int32_t peer) {
  Link& link = links_[static_cast<std::size_t>(peer)];
  if (link.stream) link.stream->flush();
}

// Whether the other end may live although the connection has ended.
bool Control::may_go_on(const Link& link) const {
  const int error = link.stream->error();
  return link.crosses_hosts && (error == ECONNRESET || error == ECONNABORTED || error == EPIPE) && !stopping_;
}

void Control::link_ended(std::int32_t peer) {
  Link& link = links_[static_cast<std::size_t>(peer)];
  if (!may_go_on(link) || departures_[static_cast<std::size_t>(peer)].has_value()) {
    lose_link(peer);
    return;
  }
  link.ends_at = Clock::now() + resumption_time();
  lost_connections_.push_back({control_links, 0, peer, {0, link.stream->resumptions()}});
  ring_all();
}

void Control::lose_link(std::int32_t peer, Loss loss) {
  Link& link = links_[static_cast<std::size_t>(peer)];
  if (!link.stream) return;
  const int error = link.stream->error();
  link.stream.reset();
  link.process.reset();
  link.ends_at.reset();
  if (stopping_ || departures_[static_cast<std::size_t>(peer)].has_value()) return;
  const bool is_silent = loss == Loss::out_of_reach || silent(error);
  const std::string what = is_silent ? " is out of reach: its host or the network has given no sign of life" : " died";
  set_failure({FailureKind::peer_lost, rank_, peer, -1, ranks_text({peer}) + what}, rank_);
}

void Control::lose_late_links(Clock::time_point now) {
  for (std::int32_t peer = 0; peer < size_; ++peer)
    if (links_[static_cast<std::size_t>(peer)].ends_at.value_or(Clock::time_point::max()) <= now)
      lose_link(peer, Loss::out_of_reach);
}

// Declares peers lost that have been silent for too long, and asks for another connection to them before that. If this
// process itself was stopped meanwhile, the silence counts anew, because nobody listened.
void Control::look_at_links(Clock::time_point now) {
  const bool was_stopped = now - looked_at_ > lost_after_ / 2;
  looked_at_ = now;
  next_look_ = Clock::time_point::max();
  bool reports = false;
  for (std::int32_t peer = 0; peer < size_; ++peer) {
    Link& link = links_[static_cast<std::size_t>(peer)];
    if (!link.stream || !link.crosses_hosts) continue;
    next_look_ = now + look_period();
    if (link.ends_at) continue;
    if (was_stopped) link.stream->forget_silence();
    link.stream->look(now);
    if (link.stream->silence().unheard(now) >= lost_after_) {
      lose_link(peer, Loss::out_of_reach);
    } else if (link.stream->silence().stuck(now) >= silent_after() &&
               lost_connections_.size() < static_cast<std::size_t>(size_)) {
      lost_connections_.push_back({control_links, 0, peer, {0, link.stream->resumptions()}});
      reports = true;
    }
  }
  if (reports) ring_all();
}

std::optional<StreamState> Control::retire_link(std::int32_t peer, std::uint32_t resumptions) {
  const std::lock_guard lock(mutex_);
  Link& link = links_.at(static_cast<std::size_t>(peer));
  if (!link.stream || !link.crosses_hosts || link.stream->resumptions() > resumptions || stopping_) return {};
  link.ends_at = Clock::now() + resumption_time();
  return link.stream->retire();
}

bool Control::resume_link(std::int32_t peer, Connection connection, const StreamState& state) {
  const std::lock_guard lock(mutex_);
  Link& link = links_.at(static_cast<std::size_t>(peer));
  if (!link.stream || !link.ends_at) return false;
  const bool goes_on = link.stream->resume(std::move(connection), state);
  if (goes_on) {
    link.ends_at.reset();
    link.stream->flush();
    read_link(peer);  // what has arrived over the former connection
  } else {
    lose_link(peer);
  }
  wake_.ring();
  return goes_on;
}

void Control::end_link(std::int32_t peer) {
  const std::lock_guard lock(mutex_);
  if (links_.at(static_cast<std::size_t>(peer)).ends_at) lose_link(peer);
}

// Throws std::runtime_error if the frame names a rank that the job does not have.
void Control::check_ranks(const Frame& frame) const {
  const auto is_rank_or_none = [this](std::int32_t rank) { return rank >= -1 && rank < size_; };
  const bool has_peer = frame.type == FrameType::failure || frame.type == FrameType::outlook;
  if (!is_rank_or_none(frame.rank) || (has_peer && !is_rank_or_none(frame.peer)))
    throw std::runtime_error("a frame on a control link names a rank that does not exist");
}

void Control::handle(std::int32_t from, const Frame& frame) {
  switch (frame.type) {
    case FrameType::failure:
      set_failure({frame.failure, frame.rank, frame.peer, frame.sequence, frame.text}, from);
      break;
    case FrameType::blocked:
    case FrameType::mismatch:
    case FrameType::late:
    case FrameType::closing:
      if (!failed()) judge_.take_report(from, frame, Clock::now());
      break;
    case FrameType::query:
      deliver(from, answer_query(frame));
      break;
    case FrameType::answer:
      if (!failed()) judge_.take_answer(from, frame);
      break;
    case FrameType::leaving:
      note_departure(from, frame);
      break;
    case FrameType::outlook:
      note_outlook(from, frame);
      break;
    case FrameType::clock: {
      Frame answer = frame;
      answer.type = FrameType::time;
      answer.sequence = now_ns();
      send(from, answer);
      break;
    }
    case FrameType::time:
      if (from == 0) note_time(frame);
      break;
    case FrameType::settled:
      settling_.erase({frame.communicator, frame.sequence});
      changed_.notify_all();
      break;
  }
}

// Sends a frame to the rank `peer`, or handles the frame in this process if `peer` is this rank.
void Control::deliver(std::int32_t peer, const Frame& frame) {
  if (peer == rank_)
    handle(rank_, frame);
  else
    send(peer, frame);
}

void Control::send(std::int32_t peer, const Frame& frame) {
  Link& link = links_[static_cast<std::size_t>(peer)];
  if (!link.stream || link.stream->waiting_nbytes() > most_unsent_nbytes) return;
  const std::string bytes = encode(frame);
  link.stream->append(bytes.data(), bytes.size());
  frames_sent_.fetch_add(1, std::memory_order_relaxed);
  write_link(peer);
  if (link.stream->waits()) wake_.ring();  // the service thread sends the rest when there is room
}

void Control::send_to_others(std::int32_t except, const Frame& frame) {
  for (std::int32_t peer = 0; peer < size_; ++peer)
    if (peer != except) send(peer, frame);
}

void Control::set_failure(Failure failure, std::int32_t informant) {
  if (failed()) return;
  failure_ = std::move(failure);
  failed_.store(true, std::memory_order_release);
  send_to_others(informant, failure_frame());
  ring_all();
}

// A rank sends its farewell to both judges, and the hub tells the other ranks. If it departs because of an error, both
// judges tell them, because the hub may be stopped. A new hub repeats the departures that its predecessor may not have
// passed on.
void Control::note_departure(std::int32_t informant, const Frame& farewell) {
  const std::int32_t peer = farewell.rank;
  if (peer < 0 || peer >= size_ || departures_[static_cast<std::size_t>(peer)].has_value()) return;
  const bool was_hub = is_hub();
  departures_[static_cast<std::size_t>(peer)] = Clock::now();
  farewells_[static_cast<std::size_t>(peer)] = farewell.text;
  note_channels(peer, farewell);
  judge_.note_departure(peer, farewell.text);
  if (informant == peer && (was_hub || !farewell.text.empty()))
    for (std::int32_t other = 0; other < size_; ++other)
      if (other != peer) send(other, farewell_frame(peer, other));
  if (!was_hub && is_hub())
    for (std::int32_t other = 0; other < size_; ++other)
      if (other != peer) send_past_events(other);
  ring_all();
}

void Control::note_channels(std::int32_t peer, const Frame& farewell) {
  auto& channels = channels_[static_cast<std::size_t>(peer)];
  const auto most = static_cast<std::int64_t>(std::numeric_limits<std::int32_t>::max());
  if (farewell.members.size() == static_cast<std::size_t>(size_)) {
    channels = farewell.members;
  } else {
    channels.assign(static_cast<std::size_t>(size_), -1);
    channels[static_cast<std::size_t>(rank_)] =
        static_cast<std::int32_t>(std::clamp<std::int64_t>(farewell.number, -1, most));
  }
}

void Control::notify(std::string text, bool important) {
  const std::lock_guard lock(mutex_);
  if (notices_.size() >= most_notices) return;
  notices_.emplace_back(std::move(text), important);
  ring_all();
}

std::vector<std::pair<std::string, bool>> Control::take_notices() {
  const std::lock_guard lock(mutex_);
  return std::exchange(notices_, {});
}

void Control::ring_all() {
  for (const int doorbell : doorbells_) Doorbell::ring(doorbell);
  changed_.notify_all();
}

// Returns the answer of this rank to a query: the state of a call or, for sequence -1, the call that the rank is in.
Frame Control::answer_query(const Frame& query) const {
  Frame answer;
  answer.type = FrameType::answer;
  answer.rank = rank_;
  answer.peer = query.peer;
  answer.communicator = query.communicator;
  answer.sequence = query.sequence;
  const auto sequence = static_cast<std::uint64_t>(query.sequence);
  const auto record = query.sequence < 0 ? recorder_.running() : recorder_.find(query.communicator, sequence);
  if (record) {
    answer.state = record->returned ? CallState::returned : CallState::running;
    answer.digest = record->digest;
    answer.text = record->text();
    answer.waits_for = record->peer;
    return answer;
  }
  const auto last = query.sequence < 0 ? recorder_.latest() : recorder_.last(query.communicator);
  if (query.sequence >= 0 && last && last->sequence > sequence) {
    answer.state = CallState::forgotten;
    return answer;
  }
  answer.state = CallState::not_called;
  const auto running = recorder_.running();
  answer.text = running ? "it is in " + running->text() : last ? "last: " + last->text() : "it has called nothing";
  return answer;
}

}  // namespace unisono
