// What the kernel knows of this process's TCP connections: the unsent bytes, which the process has written but the
// network or the receiver does not take; and from which ends nothing comes any more. congestion.h finds the slow or cut
// part of a network from them.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace fusedcomm {

// Addresses are numeric, without ports; ends have them, "10.0.0.1:80". All fields are empty except on Linux: other
// systems do not report these numbers.
struct Connections {
  // By remote address: bytes written but not sent. Holds only addresses with such bytes.
  std::map<std::string, int64_t> unsent;
  // By remote address: bytes acknowledged by the remote end since the connections were made.
  std::map<std::string, int64_t> arrived;
  // By remote address: seconds for which the remote end has not acknowledged bytes that were sent several times. The
  // kernel of a stopped process still acknowledges, so that host or the link to it is down. The longest of all
  // connections; holds only addresses with such bytes.
  std::map<std::string, double> unacked_s;
  // By remote address: seconds since bytes last came from there. The shortest of all connections that are open and
  // whose remote port is not the store's.
  std::map<std::string, double> heard_s;
  // The local addresses of the connections.
  std::set<std::string> own;
  // Both ends of all connections, with ports; the remote ones of open connections only.
  std::set<std::string> own_ends, open_ends;
};

// Adds up all TCP connections of this process. `store_port`: see heard_s; 0: there is none.
Connections connections(int store_port = 0);

}  // namespace fusedcomm
