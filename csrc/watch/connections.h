// The unsent bytes of this process's TCP connections: the process has written them, but the network or the receiver
// accepts no more. congestion.h finds the slow part of a network from them.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace fusedcomm {

// Addresses are numeric, without ports. All fields are empty except on Linux: other systems do not report these
// numbers.
struct Connections {
  // By remote address: bytes written but not sent. Holds only addresses with such bytes.
  std::map<std::string, int64_t> unsent;
  // By remote address: bytes acknowledged by the remote end since the connections were made.
  std::map<std::string, int64_t> arrived;
  // The local addresses of the connections.
  std::set<std::string> own;
};

// Adds up all TCP connections of this process.
Connections connections();

}  // namespace fusedcomm
