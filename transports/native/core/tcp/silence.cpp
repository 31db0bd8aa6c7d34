#include "tcp/silence.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstring>

namespace unisono {
namespace {

using namespace std::chrono_literals;

// The kernel's clock of received segments ticks every few milliseconds.
constexpr auto clock_tick = 20ms;
// The offset of tcpi_bytes_acked, which Linux has since 4.1 and the headers of C libraries lack.
constexpr std::size_t offset_of_acknowledged = 120;

struct ConnectionFacts {
  tcp_info info;
  std::uint64_t acknowledged;  // bytes; 0 on an older kernel
};

std::optional<ConnectionFacts> facts_of(int socket) {
  alignas(tcp_info) std::byte bytes[512] = {};
  socklen_t nbytes = sizeof bytes;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, bytes, &nbytes) != 0) return std::nullopt;
  ConnectionFacts facts{};
  std::memcpy(&facts.info, bytes, sizeof facts.info);
  std::memcpy(&facts.acknowledged, bytes + offset_of_acknowledged, sizeof facts.acknowledged);
  return facts;
}

}  // namespace

void Silence::look(int socket, Clock::time_point now) {
  const auto facts = facts_of(socket);
  if (!facts || (facts->info.tcpi_unacked == 0 && facts->info.tcpi_probes == 0)) {
    reset();
    return;
  }
  const auto heard_at = now - std::chrono::milliseconds(facts->info.tcpi_last_ack_recv);
  const auto is_heard_since = [heard_at](const Since& since) { return !since || heard_at > *since + clock_tick; };
  const bool advances = facts->acknowledged != acknowledged_;
  acknowledged_ = facts->acknowledged;
  if (is_heard_since(unheard_since_)) unheard_since_ = now;
  if (facts->info.tcpi_unacked != 0 ? !stuck_since_ || advances : is_heard_since(stuck_since_)) stuck_since_ = now;
}

}  // namespace unisono
