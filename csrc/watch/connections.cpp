#include "watch/connections.h"

#if defined(__linux__)

#include <arpa/inet.h>
#include <dirent.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>
#include <memory>

namespace fusedcomm {
namespace {

// Returns the numeric address of one end of the socket `fd`: the remote end if `get` is getpeername, the local end if
// it is getsockname. Empty if `fd` is not an internet socket or has been closed.
std::string end_of(int fd, int (*get)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t nbytes = sizeof(address);
  if (get(fd, reinterpret_cast<sockaddr*>(&address), &nbytes) != 0) return "";
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    sockaddr_in v4{};
    std::memcpy(&v4, &address, sizeof(v4));
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
  } else if (address.ss_family == AF_INET6) {
    sockaddr_in6 v6{};
    std::memcpy(&v6, &address, sizeof(v6));
    inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
  }
  constexpr char kMapped[] = "::ffff:";  // an IPv4 address on a socket for both IPv4 and IPv6
  const std::string found = text;
  return found.rfind(kMapped, 0) == 0 ? found.substr(sizeof(kMapped) - 1) : found;
}

// Returns the bytes written to `fd` but not sent, or -1 if `fd` is not a TCP connection.
int64_t unsent_nbytes(int fd) {
  int type = 0, nbytes = 0;
  socklen_t size = sizeof(type);
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) return -1;
  return ioctl(fd, SIOCOUTQNSD, &nbytes) == 0 ? nbytes : -1;
}

// Returns the bytes that the remote end has acknowledged, or 0 if the kernel does not report them.
int64_t arrived_nbytes(int fd) {
  tcp_info info{};  // an older kernel fills in only the first fields
  socklen_t size = sizeof(info);
  const bool is_known = getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
  return is_known ? static_cast<int64_t>(info.tcpi_bytes_acked) : 0;
}

}  // namespace

Connections connections() {
  Connections found;
  const std::unique_ptr<DIR, int (*)(DIR*)> fds(opendir("/proc/self/fd"), closedir);
  if (!fds) return found;
  while (const dirent* entry = readdir(fds.get())) {
    char* rest = nullptr;
    const int fd = static_cast<int>(std::strtol(entry->d_name, &rest, 10));
    if (*rest != '\0') continue;  // "." and ".."
    const int64_t nbytes = unsent_nbytes(fd);
    const std::string end = nbytes < 0 ? "" : end_of(fd, getpeername);
    if (end.empty()) continue;
    if (nbytes > 0) found.unsent[end] += nbytes;
    found.arrived[end] += arrived_nbytes(fd);
    found.own.insert(end_of(fd, getsockname));
  }
  return found;
}

}  // namespace fusedcomm

#else

namespace fusedcomm {
Connections connections() { return {}; }
}  // namespace fusedcomm

#endif
