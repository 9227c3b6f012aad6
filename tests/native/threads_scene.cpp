// Starts a thread whose stack is larger than the address space, and prints the error; for tests/lanes/test_threads.py.
// Then starts one as usual, and prints its name.
#include <pthread.h>

#include <cstdio>

#include "lanes/threads.h"
#include "require.h"

int main() {
  pthread_attr_t usual, endless;
  REQUIRE(pthread_getattr_default_np(&usual) == 0 && pthread_getattr_default_np(&endless) == 0, "no attributes");
  REQUIRE(pthread_attr_setstacksize(&endless, size_t{1} << 48) == 0, "no such size");
  REQUIRE(pthread_setattr_default_np(&endless) == 0, "not taken");
  try {
    fusedcomm::start_thread("fc-test", [] {}).join();
  } catch (const std::system_error& error) {
    std::puts(error.what());
  }
  REQUIRE(pthread_setattr_default_np(&usual) == 0, "not taken");
  char name[16] = "";
  fusedcomm::start_thread("fc-test", [&name] {
    // The name is given when the thread may already run.
    while (pthread_getname_np(pthread_self(), name, sizeof(name)) == 0 && std::string(name) != "fc-test") continue;
  }).join();
  std::puts(name);
  return 0;
}
