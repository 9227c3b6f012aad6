// The check of the native tests. The first condition that is false aborts the test and prints the message.
#pragma once

#include <cstdio>
#include <cstdlib>

#define REQUIRE(condition, ...)                                            \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fprintf(stderr, "\n");                                          \
      std::abort();                                                        \
    }                                                                      \
  } while (0)
