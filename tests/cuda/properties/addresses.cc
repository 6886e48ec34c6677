// SPDX-License-Identifier: Apache-2.0
// Where memory lies changes no bit (docs/semantics.md, Addresses): cudaMallocAsync, and addresses
// of our choosing, low and high, by cuMemMap. A tensor with lengths that lies lower than it is
// long is left to cuda_sm80, and TESSERA_LOG=dispatch says so.
#include <cuda.h>

#include "properties.h"

namespace tessera_test {
namespace {

// The driver that the process has; the tests are not linked with libcuda.
template <typename Function>
Function driver(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  constexpr unsigned kSinceCuda12 = 12000;
  require(cudaGetDriverEntryPointByVersion(name, &entry, kSinceCuda12, cudaEnableDefault, &found),
          name);
  require(entry != nullptr, text("%s: not found in the driver", name));
  return reinterpret_cast<Function>(entry);
}
#define TESSERA_DRIVER(function, ...) \
  require_driver(driver<decltype(&function)>(#function)(__VA_ARGS__), #function)

void require_driver(CUresult result, const char* name) {
  require(result == CUDA_SUCCESS, text("%s: error %d", name, static_cast<int>(result)));
}

class Pool final : public Memory {
 public:
  char* take(size_t bytes) override {
    void* base = nullptr;
    require(cudaMallocAsync(&base, bytes, nullptr), "cudaMallocAsync");
    require(cudaStreamSynchronize(nullptr), "cudaMallocAsync");
    return static_cast<char*>(base);
  }
  void give_back(char* base) override { (void)cudaFreeAsync(base, nullptr); }
};

// Memory at an address of the caller's choosing: arrays follow each other and leave together.
class Arena final : public Memory {
 public:
  explicit Arena(uint64_t address) {
    const auto reserve = driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve");
    const CUresult result = reserve(&base_, kBytes, 0, static_cast<CUdeviceptr>(address), 0);
    if (result != CUDA_SUCCESS || base_ != address) {
      if (result == CUDA_SUCCESS) free_address();
      throw Skipped(text("cuMemAddressReserve does not give 0x%llx",
                         static_cast<unsigned long long>(address)));
    }
    CUmemAllocationProp what{};
    what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    what.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    CUmemAccessDesc access{};
    access.location = what.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    try {
      TESSERA_DRIVER(cuMemCreate, &handle_, kBytes, &what, 0);
      TESSERA_DRIVER(cuMemMap, base_, kBytes, 0, handle_, 0);
      is_mapped_ = true;
      TESSERA_DRIVER(cuMemSetAccess, base_, kBytes, &access, 1);
    } catch (...) {
      release();
      throw;
    }
  }
  ~Arena() override { release(); }

  uint64_t address() const { return base_; }
  char* take(size_t bytes) override {
    const size_t at = (used_ + kAlignment - 1) / kAlignment * kAlignment;
    require(at + bytes <= kBytes, "the arena is full");
    used_ = at + bytes;
    ++arrays_;
    return reinterpret_cast<char*>(static_cast<uintptr_t>(base_ + at));
  }
  void give_back(char*) override {
    if (--arrays_ == 0) used_ = 0;
  }

 private:
  static constexpr size_t kBytes = size_t{2} << 30, kAlignment = 256;

  void free_address() {
    (void)driver<decltype(&cuMemAddressFree)>("cuMemAddressFree")(base_, kBytes);
  }
  void release() {
    (void)cudaDeviceSynchronize();
    if (is_mapped_) (void)driver<decltype(&cuMemUnmap)>("cuMemUnmap")(base_, kBytes);
    if (handle_) (void)driver<decltype(&cuMemRelease)>("cuMemRelease")(handle_);
    free_address();
  }

  CUdeviceptr base_ = 0;
  CUmemGenericAllocationHandle handle_ = 0;
  bool is_mapped_ = false;
  size_t used_ = 0;
  int arrays_ = 0;
};

// The first of these addresses that can be had.
std::unique_ptr<Arena> arena_at(const std::vector<uint64_t>& addresses) {
  std::string why;
  for (const uint64_t address : addresses) {
    try {
      return std::make_unique<Arena>(address);
    } catch (const Skipped& refused) {
      why = refused.what();
    }
  }
  throw Skipped(why);
}
// Below 2^24 rows of any of the cases, from the lowest on.
std::unique_ptr<Arena> low_arena() {
  std::vector<uint64_t> all;
  for (int bits = 21; bits < 34; ++bits) all.push_back(uint64_t{1} << bits);
  return arena_at(all);
}
std::unique_ptr<Arena> middle_arena() {
  std::vector<uint64_t> all;
  for (int i = 1; i < 12; ++i) all.push_back((uint64_t{1} << 30) * static_cast<uint64_t>(i));
  return arena_at(all);
}
std::unique_ptr<Arena> high_arena() {
  std::vector<uint64_t> all;
  for (int bits = 48; bits > 40; --bits) {
    all.push_back((uint64_t{1} << bits) - (uint64_t{1} << 36));
  }
  return arena_at(all);
}

constexpr struct {
  const char* name;
  std::unique_ptr<Memory> (*make)();
} kPlaces[] = {
    {"cudaMallocAsync", [] { return std::unique_ptr<Memory>(new Pool); }},
    {"1 to 12 GiB", [] { return std::unique_ptr<Memory>(middle_arena()); }},
    {"high", [] { return std::unique_ptr<Memory>(high_arena()); }},
};

// Packed and padded problems whose maps do not begin at their tensors, both passes.
std::vector<Options> problems(const std::string& backend) {
  Options large, one, padded, wide;
  large.format = one.format = wide.format = TESSERA_THD;
  large.hq = 32, large.hk = 8, large.d = 128, large.lengths = {3000, 5000};
  one.b = 1, one.hq = one.hk = 4, one.d = 256, one.lengths = {150};
  padded.sq = padded.sk = 2048, padded.hq = padded.hk = 6, padded.lengths = {2048, 1100};
  wide.hq = 8, wide.hk = 1, wide.d = 512, wide.lengths = {300, 200};
  Options heads_first = padded, rows_first = padded;
  heads_first.format = TESSERA_BHSD, rows_first.format = TESSERA_SBHD;
  std::vector<Options> all;
  for (Options o : {large, one, padded, heads_first, rows_first, wide}) {
    o.backend = backend;
    all.push_back(o);
    if (o.d > 256) continue;
    o.flags = TESSERA_CAUSAL | TESSERA_DETERMINISTIC;
    o.pass = TESSERA_BACKWARD;
    all.push_back(o);
  }
  return all;
}

// Outputs of a problem whose tensors and workspace lie in `memory`; null: cudaMalloc's.
std::vector<uint8_t> outputs_in(Memory* memory, const Options& options) {
  if (memory) memory->use();
  Attention attention(options);
  attention.run();
  attention.check_guards();
  return attention.outputs();
}

std::string gives_the_same_bits(const Options& options, const decltype(*kPlaces)& place) {
  const std::vector<uint8_t> expected = outputs_in(nullptr, options);
  const std::unique_ptr<Memory> memory = place.make();
  require_equal(expected, outputs_in(memory.get(), options), "the outputs");
  const auto* arena = dynamic_cast<const Arena*>(memory.get());
  return arena ? text("the same bits at 0x%llx", static_cast<unsigned long long>(arena->address()))
               : "the same bits";
}

// A call of cuda_sm90 where q lies lower than its rows take, and what cuda_sm80 gives elsewhere.
std::string is_left_to_another(Options options) {
  options.backend = "cuda_sm80";
  const std::vector<uint8_t> expected = outputs_in(nullptr, options);
  options.backend = "cuda_sm90";
  const std::unique_ptr<Arena> arena = low_arena();
  arena->use();
  Attention attention(options);
  const tessera_tensor& q = attention.problem.tensor[TESSERA_Q];
  const auto bytes = static_cast<uint64_t>(q.extent[1] * q.stride[1] * 2);
  if (reinterpret_cast<uintptr_t>(attention.buffers.data[TESSERA_Q]) > bytes) {
    throw Skipped(
        text("the lowest address is 0x%llx", static_cast<unsigned long long>(arena->address())));
  }
  const Log log;
  attention.run();
  attention.check_guards();
  require_equal(expected, attention.outputs(), "the outputs");
  require(log.messages.size() == 1, text("%zu messages", log.messages.size()));
  require(log.messages[0].find("with lengths, must be greater than") != std::string::npos,
          log.messages[0]);
  return log.messages[0];
}

}  // namespace

void addresses() {
  for (const std::string& backend : backends()) {
    for (const Options& options : problems(backend)) {
      for (const auto& place : kPlaces) {
        check("addresses", name_of(options) + ", " + place.name,
              [&] { return gives_the_same_bits(options, place); });
      }
    }
  }
  if (device_arch() != 90) return;
  for (const Options& options : {problems("cuda_sm90")[0], problems("cuda_sm90")[1]}) {
    check("addresses", name_of(options) + ", below its own size",
          [&] { return is_left_to_another(options); });
  }
}

}  // namespace tessera_test
