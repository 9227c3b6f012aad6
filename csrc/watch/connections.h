// What this process has given to its TCP connections and they have not sent, because the line or the other end takes no
// more. congestion.h finds the slow place of a network from it.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace fusedcomm {

// Addresses are numeric, without ports. Empty on systems other than Linux, which do not tell.
struct Connections {
  // Bytes that have not left, by the other end's address.
  std::map<std::string, int64_t> unsent;
  // Bytes that have arrived there since the connections were made.
  std::map<std::string, int64_t> arrived;
  // The addresses of this end.
  std::set<std::string> own;
};

Connections connections();

}  // namespace fusedcomm
