// Relays packets between hosts as a wide-area network does: limited rates, delays, jitter, losses and cuts.
//
// Run as `wan_relay SEED DESCRIPTOR…`. Descriptor number k is the TUN device of host k, whose IPv4 address ends in k
// + 1.
//
// Theory of operation
// -------------------
// Hosts send packets; the relay decides when each of them arrives. A packet from host i to host j passes three links in
// turn: the uplink of host i, the way from i to j, and the downlink of host j. A link with a rate sends one packet
// after the other, so a packet waits until those before it have left. A link drops a packet that would wait longer than
// the queue of the link holds. After the way, the packet is under way for the delay and a random jitter. Packets of one
// way never overtake each other.
//
// A packet reaches the uplink and its way when it is read. It reaches the downlink when its delay has passed, because
// packets of other ways may be there earlier. So events lie in a heap, ordered by time: a packet *arrives* at the
// downlink, and is *delivered* after it. For example, 1,500 bytes over ways of 12 Mbit/s and 50 ms arrive after 51 ms.
//
// Standard input has commands, one a line, and the relay answers each by `ok` or `bad`. Rates of 0 are unlimited.
//   host HOST UP_BIT_PER_S DOWN_BIT_PER_S QUEUE_US
//   way FROM TO BIT_PER_S QUEUE_US DELAY_US JITTER_US LOSS CUT
// LOSS is the share of lost packets, and CUT is 1 if all are lost. The relay ends when standard input is closed.
#include <fcntl.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <queue>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using std::chrono::microseconds;
using std::chrono::nanoseconds;

constexpr std::size_t most_packet_nbytes = 65536;
constexpr std::size_t ip_version_shift = 4;
constexpr std::size_t ipv4_header_nbytes = 20;
constexpr std::size_t ipv4_last_of_destination = 19;
// Packets that are read from one host before the others have their turn.
constexpr int most_at_once = 64;

//! A part of the network that sends one packet after the other.
class Link {
 public:
  void set(double bit_per_s, microseconds queue) {
    ns_per_byte_ = bit_per_s > 0 ? 8e9 / bit_per_s : 0;
    queue_ = queue;
  }

  //! Whether a packet that reaches the link at `now` finds the queue full.
  bool full(Time now) const { return ns_per_byte_ > 0 && free_at_ - now > queue_; }

  //! Returns when the last byte of a packet that reaches the link at `now` has left it.
  Time passed(Time now, std::size_t nbytes) {
    if (ns_per_byte_ <= 0) return now;
    const auto takes = nanoseconds(static_cast<std::int64_t>(ns_per_byte_ * static_cast<double>(nbytes)));
    return free_at_ = std::max(free_at_, now) + takes;
  }

 private:
  double ns_per_byte_ = 0;  // 0 without a limit
  nanoseconds queue_{};
  Time free_at_{};
};

//! The network between two hosts, in one direction.
struct Way {
  Link link;
  microseconds delay{};
  microseconds jitter{};
  double loss = 0;
  bool is_cut = false;
  Time last_arrival{};
};

struct Host {
  int device = -1;
  Link up;
  Link down;
  std::vector<Way> ways;  // to each host
};

//! A packet at a moment: it arrives at the downlink of its destination, or is delivered after it.
struct Event {
  Time at;
  std::uint64_t number;  // keeps events of the same time in order
  bool is_delivery;
  std::size_t to;
  std::vector<std::byte> packet;
};

struct Later {
  bool operator()(const Event& a, const Event& b) const { return a.at != b.at ? a.at > b.at : a.number > b.number; }
};

class Relay {
 public:
  Relay(std::uint64_t seed, const std::vector<int>& devices) : dice_(seed) {
    for (const int device : devices) {
      hosts_.emplace_back();
      hosts_.back().device = device;
      hosts_.back().ways.resize(devices.size());
      ::fcntl(device, F_SETFL, O_RDWR | O_NONBLOCK);
    }
  }

  //! Relays until standard input is closed.
  void run() {
    std::vector<pollfd> polled{{STDIN_FILENO, POLLIN, 0}};
    for (const Host& host : hosts_) polled.push_back({host.device, POLLIN, 0});
    for (;;) {
      const timespec patience = until_next_event();
      ::ppoll(polled.data(), polled.size(), events_.empty() ? nullptr : &patience, nullptr);
      if (polled[0].revents != 0 && !obey()) return;
      for (std::size_t from = 0; from < hosts_.size(); ++from)
        if (polled[from + 1].revents != 0) accept(from);
      pass_on();
    }
  }

 private:
  timespec until_next_event() const {
    if (events_.empty()) return {};
    const nanoseconds remaining = std::max(nanoseconds::zero(), nanoseconds(events_.top().at - Clock::now()));
    const auto whole = std::chrono::duration_cast<std::chrono::seconds>(remaining);
    return {whole.count(), (remaining - whole).count()};
  }

  //! Reads packets of a host and puts them under way.
  void accept(std::size_t from) {
    for (int k = 0; k < most_at_once; ++k) {
      const auto got = ::read(hosts_[from].device, buffer_.data(), buffer_.size());
      if (got <= 0) return;
      send(from, static_cast<std::size_t>(got));
    }
  }

  void send(std::size_t from, std::size_t nbytes) {
    if (nbytes < ipv4_header_nbytes || std::to_integer<int>(buffer_[0] >> ip_version_shift) != 4) return;
    const auto to = static_cast<std::size_t>(buffer_[ipv4_last_of_destination]) - 1;
    if (to >= hosts_.size() || to == from) return;
    Link& up = hosts_[from].up;
    Way& way = hosts_[from].ways[to];
    Time time = Clock::now();
    if (up.full(time)) return;
    time = up.passed(time, nbytes);
    if (way.is_cut || way.link.full(time)) return;
    time = way.link.passed(time, nbytes);
    if (unit_(dice_) < way.loss) return;
    const double jitter_us = unit_(dice_) * static_cast<double>(way.jitter.count());
    way.last_arrival =
        std::max(way.last_arrival, time + way.delay + microseconds(static_cast<std::int64_t>(jitter_us)));
    const auto* data = buffer_.data();
    events_.push({way.last_arrival, number_++, false, to, {data, data + nbytes}});
  }

  //! Handles the events that are due.
  void pass_on() {
    while (!events_.empty() && events_.top().at <= Clock::now()) {
      Event event = std::move(const_cast<Event&>(events_.top()));  // `pop` removes it at once
      events_.pop();
      Host& host = hosts_[event.to];
      if (event.is_delivery) {
        if (::write(host.device, event.packet.data(), event.packet.size()) < 0) continue;  // the host is overrun
      } else if (!host.down.full(event.at)) {
        event.at = host.down.passed(event.at, event.packet.size());
        event.number = number_++;
        event.is_delivery = true;
        events_.push(std::move(event));
      }
    }
  }

  //! Reads commands and answers them. Returns false at the end of standard input.
  bool obey() {
    std::array<char, 4096> text;
    const auto got = ::read(STDIN_FILENO, text.data(), text.size());
    if (got <= 0) return false;
    commands_.append(text.data(), static_cast<std::size_t>(got));
    for (std::size_t end; (end = commands_.find('\n')) != std::string::npos; commands_.erase(0, end + 1)) {
      std::istringstream words(commands_.substr(0, end));
      std::fputs(change(words) ? "ok\n" : "bad\n", stdout);
    }
    std::fflush(stdout);
    return true;
  }

  bool change(std::istringstream& words) {
    std::string kind;
    std::size_t host = 0;
    if (!(words >> kind >> host) || host >= hosts_.size()) return false;
    if (kind == "host") return change_host(hosts_[host], words);
    std::size_t to = 0;
    return kind == "way" && words >> to && to < hosts_.size() && change_way(hosts_[host].ways[to], words);
  }

  static bool change_host(Host& host, std::istringstream& words) {
    double up = 0;
    double down = 0;
    std::int64_t queue_us = 0;
    if (!(words >> up >> down >> queue_us)) return false;
    host.up.set(up, microseconds(queue_us));
    host.down.set(down, microseconds(queue_us));
    return true;
  }

  static bool change_way(Way& way, std::istringstream& words) {
    double rate = 0;
    double loss = 0;
    std::int64_t queue_us = 0;
    std::int64_t delay_us = 0;
    std::int64_t jitter_us = 0;
    bool is_cut = false;
    if (!(words >> rate >> queue_us >> delay_us >> jitter_us >> loss >> is_cut)) return false;
    way.link.set(rate, microseconds(queue_us));
    way.delay = microseconds(delay_us);
    way.jitter = microseconds(jitter_us);
    way.loss = loss;
    way.is_cut = is_cut;
    return true;
  }

  std::vector<Host> hosts_;
  std::priority_queue<Event, std::vector<Event>, Later> events_;
  std::uint64_t number_ = 0;
  std::mt19937_64 dice_;
  std::uniform_real_distribution<double> unit_{0, 1};
  std::vector<std::byte> buffer_ = std::vector<std::byte>(most_packet_nbytes);
  std::string commands_;
};

// Other programs must not delay packets. Both calls may be refused, and the relay is only less exact then.
void come_first() {
  const sched_param first{1};
  ::sched_setscheduler(0, SCHED_FIFO, &first);
  ::setpriority(PRIO_PROCESS, 0, -20);
  ::prctl(PR_SET_TIMERSLACK, 1UL);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return 2;
  std::signal(SIGINT, SIG_IGN);  // the process that started the relay ends it
  std::vector<int> devices;
  for (int k = 2; k < count; ++k) devices.push_back(std::atoi(arguments[k]));
  come_first();
  Relay(std::strtoull(arguments[1], nullptr, 10), devices).run();
}
