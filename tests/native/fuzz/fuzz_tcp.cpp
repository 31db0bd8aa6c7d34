// TCP: a peer that sends any bytes, and one that follows the format with any header.
#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "fuzz.h"
#include "hostile.h"
#include "ranks.h"
#include "tcp_channel.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

// A socket's buffer holds this many bytes, so that no side blocks.
constexpr std::size_t most_at_once = 32 << 10;

std::vector<Connection> single(Descriptor socket) {
  std::vector<Connection> sockets;
  sockets.push_back(std::move(socket));
  return sockets;
}

void send_message(Input& input, Channel& peer) {
  Header header{};
  header.nbytes = input.take<std::uint8_t>() % 2 == 0 ? input.take<std::uint16_t>() : input.take<std::uint64_t>();
  header.sequence = input.take<std::uint32_t>();
  header.kind = input.take<std::uint8_t>();
  const std::vector<std::byte> payload(std::min<std::size_t>(header.nbytes, most_at_once));
  peer.begin(header);
  peer.write(payload.data(), payload.size());
  peer.flush();
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  Input input(data, nbytes);
  SocketPair sockets = unix_pair();
  const int raw = ::dup(sockets.a.get());
  const Descriptor raw_owner(raw);
  const TcpTerms terms{3, input.take<std::uint8_t>() % 2 != 0};
  TcpChannel peer(1, single(std::move(sockets.a)), terms);
  TcpChannel channel(0, single(std::move(sockets.b)), terms);
  Drain drain(channel);
  while (!input.empty()) {
    if (input.take<std::uint8_t>() % 2 == 0) {
      send_message(input, peer);
    } else {
      const auto part = input.bytes(input.take<std::uint8_t>());
      if (!part.empty()) ::send(raw, part.data(), part.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (!drain.run()) break;
  }
  return 0;
}
