// moebius_fuzz: random shapes, formats, routings and threads against a golden, for sanitizers.
//   moebius_fuzz [--seed S] [--cases N] [--seconds T] [--pool-runs N] [--verbose]
// runs cases S, S + 1, ... until N are done or T seconds are over, after a stress of the thread pool. Exits with 1 at
// the first failure and prints the command that repeats it.
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "tests/kernels/fuzz/fuzz_run.h"
#include "kernels/testing/pool_stress.h"

namespace {

using namespace moebius;

struct Arguments {
  uint64_t seed = 1;
  uint64_t cases = 1000;
  uint64_t seconds = 3600;
  uint64_t pool_runs = 20000;
  bool verbose = false;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--verbose") {
      arguments.verbose = true;
      continue;
    }
    uint64_t* const target = name == "--seed"        ? &arguments.seed
                             : name == "--cases"     ? &arguments.cases
                             : name == "--seconds"   ? &arguments.seconds
                             : name == "--pool-runs" ? &arguments.pool_runs
                                                     : nullptr;
    if (target == nullptr) {
      throw std::invalid_argument(name + " is unknown; allowed: --seed, --cases, --seconds, --pool-runs, --verbose");
    }
    const char* const text = i + 1 < argc ? argv[++i] : "";
    const auto [end, error] = std::from_chars(text, text + std::strlen(text), *target);
    if (error != std::errc{} || *end != 0) throw std::invalid_argument(name + ": '" + text + "' is not a number");
  }
  return arguments;
}

void stress_pool(uint64_t runs) {
  for (const uint32_t threads : {2u, 5u}) {
    for (const int spin : {0, 20}) {
      pool::stress({threads, runs / 4, std::chrono::microseconds(spin), 7, 1000});
    }
  }
}

int run(const Arguments& arguments) {
  stress_pool(arguments.pool_runs);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(arguments.seconds);
  uint64_t done = 0;
  for (; done < arguments.cases && std::chrono::steady_clock::now() < end; ++done) {
    const uint64_t seed = arguments.seed + done;
    const fuzz::FuzzCase fuzz = fuzz::draw_case(seed);
    if (arguments.verbose) std::printf("seed %lu: %s\n", seed, fuzz.describe().c_str());
    std::fflush(stdout);
    try {
      fuzz::run_case(fuzz);
    } catch (const std::exception& error) {
      std::printf("FAILED: %s\n  %s\n  repeat: moebius_fuzz --pool-runs 0 --cases 1 --seed %lu\n", error.what(),
                  fuzz.describe().c_str(), seed);
      return 1;
    }
  }
  std::printf("%lu cases from seed %lu, %lu runs of the pool: all right\n", done, arguments.seed, arguments.pool_runs);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moebius_fuzz: %s\n", error.what());
    return 2;
  }
}
