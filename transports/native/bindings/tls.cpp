// TLS for Python, which makes connections and reads the messages that precede their use in the core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "python_call.h"
#include "tcp/connection.h"

namespace nb = nanobind;

namespace unisono {
namespace {

// Owns a share of the context by itself. A shared_ptr that nanobind makes of a Python object takes the interpreter's
// lock when it ends, and the core ends connections in threads that must never wait for that lock.
struct PythonTlsContext {
  std::shared_ptr<const TlsContext> shared;
};

nb::bytes bytes_of(const std::vector<std::byte>& data) { return nb::bytes(data.data(), data.size()); }

// A TLS that Python uses until a connection takes it over.
class PythonTls {
 public:
  PythonTls(const PythonTlsContext& context, int socket, bool is_client, const nb::bytes& secret) {
    Tls::Secret bytes;
    if (secret.size() != bytes.size()) throw std::invalid_argument("a secret has 32 bytes");
    std::copy_n(static_cast<const std::byte*>(secret.data()), bytes.size(), bytes.begin());
    tls_ = std::make_unique<Tls>(context.shared, socket, is_client ? Tls::Side::client : Tls::Side::server, bytes);
  }

  bool handshake() { return tls().handshake(); }

  nb::bytes exported() const {
    const Tls::Secret secret = tls().exported();
    return nb::bytes(secret.data(), secret.size());
  }

  nb::bytes public_key_of_peer() const { return bytes_of(tls().public_key_of_peer()); }

  // None if nothing has arrived.
  nb::object receive(std::size_t nbytes) {
    std::vector<std::byte> data(nbytes);
    const auto got = tls().receive(data.data(), nbytes);
    if (got >= 0) return nb::bytes(data.data(), static_cast<std::size_t>(got));
    if (errno == EAGAIN) return nb::none();
    if (errno == EBADMSG) throw TlsError(tls().error());
    throw std::system_error(errno, std::generic_category(), "a TLS connection");
  }

  // Takes part of the bytes, or none of them.
  std::size_t send(const nb::bytes& data) {
    const auto sent = tls().send(static_cast<const std::byte*>(data.data()), data.size());
    if (sent >= 0) return static_cast<std::size_t>(sent);
    if (errno == EAGAIN) return 0;
    throw std::system_error(errno, std::generic_category(), "a TLS connection");
  }

  bool flush() {
    const int error = tls().flush();
    if (error == 0 || error == EAGAIN) return error == 0;
    throw std::system_error(error, std::generic_category(), "a TLS connection");
  }

  std::unique_ptr<Tls> release() { return std::move(tls_); }

 private:
  Tls& tls() const {
    if (tls_ == nullptr) throw std::runtime_error("the TLS belongs to a connection of the core");
    return *tls_;
  }

  std::unique_ptr<Tls> tls_;
};

}  // namespace

void bind_tls(nb::module_& module) {
  nb::exception<TlsError>(module, "TlsError", PyExc_RuntimeError);
  nb::class_<PythonTlsContext>(module, "TlsContext")
      .def(
          "__init__",
          [](PythonTlsContext* place, std::string certificate, std::string key, std::string authority) {
            const TlsFiles files{std::move(certificate), std::move(key), std::move(authority)};
            new (place) PythonTlsContext{std::make_shared<const TlsContext>(files)};
          },
          nb::arg("certificate") = "", nb::arg("key") = "", nb::arg("authority") = "")
      .def("public_key", [](const PythonTlsContext& context) { return bytes_of(context.shared->public_key()); });
  nb::class_<PythonTls>(module, "Tls")
      .def(nb::init<const PythonTlsContext&, int, bool, const nb::bytes&>(), nb::arg("context"), nb::arg("socket"),
           nb::arg("is_client"), nb::arg("secret"))
      .def("handshake", &PythonTls::handshake)
      .def("exported", &PythonTls::exported)
      .def("public_key_of_peer", &PythonTls::public_key_of_peer)
      .def("receive", &PythonTls::receive, nb::arg("nbytes"))
      .def("send", &PythonTls::send, nb::arg("data"))
      .def("flush", &PythonTls::flush);
  nb::class_<Connection>(module, "Connection")
      .def(
          "__init__",
          [](Connection* place, int socket, PythonTls* tls) {
            new (place) Connection(Descriptor(socket), tls == nullptr ? nullptr : tls->release());
          },
          nb::arg("socket"), nb::arg("tls").none() = nb::none())
      .def("fileno", [](const Connection& connection) { return connection.socket.get(); });
}

}  // namespace unisono
