#include "tcp/openssl.h"

#include <dlfcn.h>

#include <cstring>
#include <string>

namespace unisono::openssl {
namespace {

constexpr const char* library_name = "libssl.so.3";

template <class Function>
void look_up(void* handle, Function& function, const char* name) {
  void* symbol = ::dlsym(handle, name);
  if (symbol == nullptr) throw TlsError(std::string(library_name) + " has no " + name);
  std::memcpy(&function, &symbol, sizeof function);
}

Library load() {
  void* handle = ::dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    throw TlsError("TLS needs OpenSSL 3, which this system does not offer: " + std::string(::dlerror()));
  Library loaded;
#define UNISONO_OPENSSL_LOOK_UP(name, result, parameters) look_up(handle, loaded.name, #name);
  UNISONO_OPENSSL(UNISONO_OPENSSL_LOOK_UP)
#undef UNISONO_OPENSSL_LOOK_UP
  // Threads of this process may use TLS until it ends, so OpenSSL must not clean up at exit.
  loaded.OPENSSL_init_ssl(init_without_exit_handler, nullptr);
  return loaded;
}

}  // namespace

const char* Library::take_error() const {
  const unsigned long code = ERR_get_error();
  const char* text = code == 0 ? nullptr : ERR_reason_error_string(code);
  ERR_clear_error();
  return text == nullptr ? "unknown error" : text;
}

const Library& library() {
  static const Library loaded = load();  // after an exception, the next call tries again
  return loaded;
}

}  // namespace unisono::openssl
