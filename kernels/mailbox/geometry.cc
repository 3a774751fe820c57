// Validation and rendering of geometries, comparison of identities.
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

#include "kernels/mailbox/segment.h"

namespace moebius::mailbox {

namespace {

void check_range(const char* field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return;
  throw std::invalid_argument(std::string("mailbox geometry: ") + field + " = " + std::to_string(value) +
                              ", allowed " + std::to_string(low) + ".." + std::to_string(high));
}

std::map<std::string, std::string> lines_by_name(const std::string& text) {
  std::map<std::string, std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) lines[line.substr(0, equals)] = line.substr(equals + 1);
  }
  return lines;
}

}  // namespace

void check_geometry(const Geometry& g) {
  check_range("num_layers", g.num_layers, 1, 1u << 16);
  check_range("hidden_size", g.hidden_size, 1, 1u << 20);
  check_range("top_k", g.top_k, 1, 1u << 12);
  check_range("num_slots", g.num_slots, 1, kMaxSlots);
  check_range("max_rows", g.max_rows, 1, 1u << 16);
  check_range("num_servers", g.num_servers, 1, kMaxServers);
  check_range("dtype", g.dtype, 1, 2);
  check_range("num_clients", g.num_clients, 1, kMaxClients);
}

std::string identity_difference(const std::string& expected, const std::string& found) {
  auto wanted = lines_by_name(expected), brought = lines_by_name(found);
  for (const auto& [name, value] : brought) wanted.try_emplace(name);
  std::string text;
  for (const auto& [name, value] : wanted) {
    const auto other = brought.find(name);
    if (other != brought.end() && other->second == value) continue;
    const std::string has = other == brought.end() || other->second.empty() ? "none" : other->second;
    text += (text.empty() ? "" : "; ") + name + " is " + has + ", expected " + (value.empty() ? "none" : value);
  }
  return text;
}

std::string describe(const Geometry& g) {
  return "layers=" + std::to_string(g.num_layers) + " hidden_size=" + std::to_string(g.hidden_size) +
         " top_k=" + std::to_string(g.top_k) + " slots=" + std::to_string(g.num_slots) +
         " rows=" + std::to_string(g.max_rows) + " servers=" + std::to_string(g.num_servers) +
         " clients=" + std::to_string(g.num_clients) +
         " dtype=" + (g.dtype == 2 ? "bfloat16" : g.dtype == 1 ? "float32" : std::to_string(g.dtype));
}

}  // namespace moebius::mailbox
