#include "tcp/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <thread>
#include <vector>

#include "breaking_connections.h"
#include "check.h"
#include "ranks.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using Bytes = std::vector<std::byte>;

std::shared_ptr<const TlsContext> context(std::uint64_t records = TlsContext::most_records) {
  return std::make_shared<const TlsContext>(TlsFiles{}, records);
}

Bytes random_bytes(std::size_t nbytes) {
  Dice dice(nbytes);
  Bytes bytes(nbytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(dice.word());
  return bytes;
}

// Returns the bytes that wait in a socket, which stay there.
Bytes on_the_wire(int socket) {
  Bytes bytes(1 << 20);
  const auto got = ::recv(socket, bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
  bytes.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
  return bytes;
}

void what_is_sent_cannot_be_read_on_the_wire() {
  ConnectionPair ends = encrypted(unix_pair(), context());
  const Bytes message = random_bytes(1000);
  CHECK(ends.a.tls->send(message.data(), message.size()) == 1000 && ends.a.tls->flush() == 0);
  const Bytes wire = on_the_wire(ends.b.socket.get());
  CHECK(wire.size() > message.size());
  CHECK(std::search(wire.begin(), wire.end(), message.begin(), message.begin() + 8) == wire.end());
  Bytes received(2000);
  CHECK(ends.b.tls->receive(received.data(), received.size()) == 1000);
  CHECK(std::equal(message.begin(), message.end(), received.begin()));
  CHECK(ends.b.tls->receive(received.data(), 1) == -1 && errno == EAGAIN && !ends.b.tls->may_have_data());
  ends.a.socket.reset();
  CHECK(ends.b.tls->receive(received.data(), 1) == 0);
}

void bytes_that_do_not_fit_wait_and_are_announced() {
  ConnectionPair ends = encrypted(unix_pair(), context());
  const Bytes message = random_bytes(3000);
  CHECK(ends.a.tls->send(message.data(), 1000) == 1000 && ends.a.tls->send(message.data() + 1000, 2000) == 2000);
  Bytes received(3000);
  CHECK(ends.b.tls->receive(received.data(), 100) == 100 && ends.b.tls->may_have_data());
  CHECK(ends.b.tls->receive(received.data() + 100, 3000) == 2900 && received == message);
}

void a_full_socket_takes_no_more_before_the_rest_is_sent() {
  ConnectionPair ends = encrypted(unix_pair(), context());
  const Bytes message = random_bytes(4 << 20);
  Bytes received(message.size());
  std::size_t sent = 0, got = 0;
  bool was_full = false;
  CHECK(eventually([&] {
    const auto part = ends.a.tls->send(message.data() + sent, message.size() - sent);
    if (part > 0) sent += static_cast<std::size_t>(part);
    was_full |= part < 0 && errno == EAGAIN && ends.a.tls->unsent_nbytes() != 0;
    if (part <= 0) {
      const auto arrived = ends.b.tls->receive(received.data() + got, received.size() - got);
      if (arrived > 0) got += static_cast<std::size_t>(arrived);
    }
    return got == message.size();
  }));
  CHECK(was_full && received == message);
}

void another_secret_is_refused_on_both_ends() {
  SocketPair sockets = unix_pair();
  Tls client(context(), sockets.a.get(), Tls::Side::client, secret_of(1));
  Tls server(context(), sockets.b.get(), Tls::Side::server, secret_of(2));
  CHECK(!client.handshake());
  CHECK(throws<TlsError>([&] { server.handshake(); }));
  CHECK(throws<TlsError>([&] { client.handshake(); }));
}

void strangers_are_refused() {
  for (const std::size_t nbytes : {1, 5, 100, 5000}) {
    SocketPair sockets = unix_pair();
    Tls server(context(), sockets.b.get(), Tls::Side::server, secret_of(1));
    CHECK(!server.handshake());
    const Bytes garbage = random_bytes(nbytes);
    CHECK(::send(sockets.a.get(), garbage.data(), nbytes, 0) == static_cast<ssize_t>(nbytes));
    const bool is_refused = throws<TlsError>([&] { server.handshake(); });
    CHECK(is_refused || nbytes < 5);
    sockets.a.reset();
    CHECK(is_refused || throws<std::system_error>([&] { server.handshake(); }));
  }
}

void changed_bytes_are_not_delivered() {
  ConnectionPair ends = encrypted(unix_pair(), context());
  const Bytes message = random_bytes(1000);
  CHECK(ends.a.tls->send(message.data(), message.size()) == 1000);
  Bytes wire(2000);
  const auto nbytes = ::recv(ends.b.socket.get(), wire.data(), wire.size(), 0);
  wire[500] ^= std::byte{1};
  CHECK(::send(ends.a.socket.get(), wire.data(), static_cast<std::size_t>(nbytes), 0) == nbytes);
  Bytes received(2000);
  CHECK(ends.b.tls->receive(received.data(), received.size()) == -1 && errno == EBADMSG);
  CHECK(!ends.b.tls->error().empty());
  CHECK(ends.b.tls->receive(received.data(), received.size()) == -1 && errno == EBADMSG);
}

void senders_take_another_key_now_and_then() {
  ConnectionPair ends = encrypted(unix_pair(), context(3));
  for (std::size_t i = 1; i < 20; ++i) {
    const Bytes message = random_bytes(i);
    Bytes received(i);
    CHECK(ends.a.tls->send(message.data(), i) == static_cast<ssize_t>(i));
    CHECK(ends.b.tls->receive(received.data(), i) == static_cast<ssize_t>(i) && received == message);
  }
}

void files_that_cannot_be_used_are_named() {
  try {
    TlsContext({"/none/certificate.pem", "/none/key.pem", "/none/authority.pem"});
    CHECK(false);
  } catch (const TlsError& error) {
    CHECK(std::string_view(error.what()).find("/none/certificate.pem") != std::string_view::npos);
  }
}

// Other addresses, because within one host nothing is kept. Small buffers, so that connections break in the midst of
// records, of which the other end has acknowledged a part.
ConnectionPair between_hosts(const std::shared_ptr<const TlsContext>& shared) {
  SocketPair sockets = tcp_pair("127.0.0.2");
  const int nbytes = 20'000;
  CHECK(::setsockopt(sockets.a.get(), SOL_SOCKET, SO_SNDBUF, &nbytes, sizeof nbytes) == 0);
  CHECK(::setsockopt(sockets.b.get(), SOL_SOCKET, SO_RCVBUF, &nbytes, sizeof nbytes) == 0);
  return encrypted(std::move(sockets), shared);
}

void channels_with_tls_deliver_every_byte_however_often_their_connections_break() {
  const auto shared = context(50);
  pass_messages_over_breaking_connections([&] { return between_hosts(shared); });
}

void ranks_with_tls_exchange_messages_in_both_directions() {
  Ranks ranks(3, Transport::encrypted);
  ranks.run([](std::int32_t rank, Endpoint& endpoint) {
    const std::int32_t to = (rank + 1) % 3, from = (rank + 2) % 3;
    for (const std::size_t nbytes : {std::size_t{0}, std::size_t{1}, std::size_t{70'000}, std::size_t{3} << 20}) {
      Bytes out = random_bytes(nbytes), in(nbytes);
      const auto receiving = endpoint.start(Message::to_receive(from, DType::uint8, 0, in.data(), in.size()), {});
      const auto sending = endpoint.start(Message::to_send(to, DType::uint8, 0, out.data(), out.size()), {});
      CHECK(endpoint.wait(*receiving, 60, nullptr) == Outcome::done);
      CHECK(endpoint.wait(*sending, 60, nullptr) == Outcome::done);
      CHECK(in == out);
    }
  });
  ranks.control(2).leave("the reason");
  CHECK(eventually([&] { return ranks.control(0).farewell(2) == "the reason"; }));
  CHECK(eventually([&] { return ranks.control(1).farewell(2) == "the reason"; }));
}

}  // namespace

int main() {
  try {
    openssl::library();
  } catch (const TlsError& error) {
    std::printf("skipped: %s\n", error.what());
    return 0;
  }
  return run_tests({
      {"what is sent cannot be read on the wire", what_is_sent_cannot_be_read_on_the_wire},
      {"bytes that do not fit wait and are announced", bytes_that_do_not_fit_wait_and_are_announced},
      {"a full socket takes no more before the rest is sent", a_full_socket_takes_no_more_before_the_rest_is_sent},
      {"another secret is refused on both ends", another_secret_is_refused_on_both_ends},
      {"strangers are refused", strangers_are_refused},
      {"changed bytes are not delivered", changed_bytes_are_not_delivered},
      {"senders take another key now and then", senders_take_another_key_now_and_then},
      {"files that cannot be used are named", files_that_cannot_be_used_are_named},
      {"channels with TLS deliver every byte however often their connections break",
       channels_with_tls_deliver_every_byte_however_often_their_connections_break},
      {"ranks with TLS exchange messages in both directions", ranks_with_tls_exchange_messages_in_both_directions},
  });
}
