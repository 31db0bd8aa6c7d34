//! A connected socket, with the TLS that encrypts its bytes if there is any.
#pragma once

#include <memory>
#include <utility>

#include "system/descriptor.h"
#include "tcp/tls.h"

namespace unisono {

//! An owned connection.
struct Connection {
  Connection() = default;
  Connection(Descriptor connected, std::unique_ptr<Tls> encryption = nullptr)
      : socket(std::move(connected)), tls(std::move(encryption)) {}

  Descriptor socket;
  std::unique_ptr<Tls> tls;
};

}  // namespace unisono
