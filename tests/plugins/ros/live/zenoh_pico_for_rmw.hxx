// What rmw_zenoh_cpp uses of Zenoh's library in Rust and Zenoh's library in C (zenoh-pico) lacks, for
// build_rmw_zenoh.sh. A session is a client of the router that ZENOH_CONFIG_OVERRIDE names; nothing else is configured,
// and there is no shared memory.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include <zenoh.hxx>

#define Z_CONFIG_SHARED_MEMORY_KEY "transport/shared_memory/enabled"
#define ZC_LOCALITY_REMOTE Z_LOCALITY_REMOTE
#define Z_ESESSION_CLOSED _Z_ERR_SESSION_CLOSED

namespace zenoh {
struct ZShmMut {
  uint8_t* data() { return nullptr; }
  operator Bytes() && { return Bytes(); }
};
struct SharedShmProvider {
  SharedShmProvider& shm_provider() { return *this; }
  std::variant<ZShmMut, int> alloc_gc_defrag(std::size_t) { return 0; }
};
}  // namespace zenoh

inline std::variant<zenoh::SharedShmProvider, int> pico_no_shared_memory() { return 0; }
inline void zc_try_init_log_from_env() {}

inline zenoh::Config pico_config(const char*, zenoh::ZResult* result) {
  auto config = zenoh::Config::create_default();
  config.insert(Z_CONFIG_MODE_KEY, "client", result);
  return config;
}

inline void pico_override(zenoh::Config& config, const std::string& key, const std::string& value,
                          zenoh::ZResult* result) {
  *result = Z_OK;
  const auto first = value.find('"') + 1;
  if (key == "connect/endpoints") {
    config.insert(Z_CONFIG_CONNECT_KEY, value.substr(first, value.rfind('"') - first).c_str(), result);
  }
}

template <typename Key>
std::string pico_get(Key, zenoh::ZResult* result) {
  *result = Z_OK;
  return "0";
}
