// What this process has given to its TCP connections and they have not sent: the line, or the other end, takes no more.
// On a network that crawls all ranks wait for each other, and in turn; but bytes pile up where it is slow.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace fusedcomm {

// Addresses are numbers, without ports. Empty where the system (not Linux) does not tell.
struct Connections {
  // Bytes, by the other end's address: what has not left, and what has arrived since the connections were made.
  std::map<std::string, int64_t> unsent, arrived;
  std::set<std::string> own;  // the addresses of this end
};

Connections connections();

}  // namespace fusedcomm
