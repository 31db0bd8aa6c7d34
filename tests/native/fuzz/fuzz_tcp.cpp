// TCP: a peer that sends any bytes, and one that follows the format with any header. Connections break, and the peer
// says anything of what it has received.
#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "fuzz.h"
#include "hostile.h"
#include "ranks.h"
#include "tcp/tcp_channel.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

// A socket's buffer holds this many bytes, so that no side blocks.
constexpr std::size_t most_at_once = 32 << 10;

enum Move : std::uint8_t { peer_sends, raw_bytes, we_send, connection_breaks, number_of_moves };

// The connections of a channel, and for each one a descriptor of its end at the peer, to which raw bytes are written.
struct Connections {
  explicit Connections(std::size_t count) {
    while (raw.size() < count) {
      SocketPair pair = unix_pair();
      raw.emplace_back(::dup(pair.a.get()));
      theirs.push_back(std::move(pair.a));
      ours.push_back(std::move(pair.b));
    }
  }
  std::vector<Connection> theirs;
  std::vector<Connection> ours;
  std::vector<Descriptor> raw;
};

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

// Sends a message that fits the socket's buffer.
void send_short_message(Input& input, TcpChannel& channel) {
  Header header{};
  header.nbytes = input.take<std::uint16_t>() % 4096;
  const std::vector<std::byte> payload(header.nbytes);
  channel.begin(header);
  channel.write(payload.data(), payload.size());
  channel.flush();
}

// Continues a stream of the channel over another connection.
void break_connection(Input& input, TcpChannel& channel, Connections& connections) {
  const std::size_t stream = input.take<std::uint8_t>() % connections.raw.size();
  const auto number = static_cast<std::uint32_t>(stream);
  if (!channel.retire({number, input.take<std::uint32_t>()})) return;
  SocketPair pair = unix_pair();
  connections.raw[stream] = std::move(pair.a);
  const std::uint64_t received =
      input.take<std::uint8_t>() % 2 == 0 ? input.take<std::uint16_t>() : input.take<std::uint64_t>();
  channel.resume(number, std::move(pair.b), {input.take<std::uint32_t>(), received});
  channel.broken();
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  Input input(data, nbytes);
  const TcpTerms terms{3, input.take<std::uint8_t>() % 2 != 0};
  Connections connections(1 + input.take<std::uint8_t>() % 3);
  TcpChannel peer(1, std::move(connections.theirs), terms);
  TcpChannel channel(0, std::move(connections.ours), terms);
  Drain drain(channel);
  while (!input.empty()) {
    const auto move = static_cast<Move>(input.take<std::uint8_t>() % number_of_moves);
    if (move == peer_sends) {
      send_message(input, peer);
    } else if (move == raw_bytes) {
      const Descriptor& raw = connections.raw[input.take<std::uint8_t>() % connections.raw.size()];
      const auto part = input.bytes(input.take<std::uint8_t>());
      if (!part.empty()) ::send(raw.get(), part.data(), part.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    } else if (move == we_send) {
      send_short_message(input, channel);
    } else {
      break_connection(input, channel, connections);
    }
    if (!drain.run()) break;
  }
  return 0;
}
