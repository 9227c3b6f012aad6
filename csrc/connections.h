// What this process has given to its TCP connections and they have not sent: the line, or the other end, takes no more.
// On a network that crawls all ranks wait for each other, and in turn; but only where it is slow do bytes pile up.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace fusedcomm {

// Addresses are numbers, without ports. Empty where the system (not Linux) does not tell.
struct Connections {
  std::map<std::string, int64_t> unsent;  // bytes, by the other end's address
  std::set<std::string> own;              // the addresses of this end
};

Connections connections();

}  // namespace fusedcomm
