// SPDX-License-Identifier: Apache-2.0
// The one translation unit with cuDNN's front end, which takes 40 s and 1 MB.
#include "cuda/cudnn/graph.h"

#include <cudnn_frontend.h>

#include <exception>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "tessera.h"

namespace tessera::cuda::cudnn {
namespace {

namespace fe = cudnn_frontend;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

// Names of the tensors of a graph. run() hands over their pointers in this order.
enum Uid : int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kScale,
  kStats,
  kGradO,
  kGradQ,
  kGradK,
  kGradV,
  kLenQ,
  kLenK,
  kOffsetQ,
  kOffsetK,
  kOffsetV,
  kOffsetO,
  kOffsetStats,
  kOffsetGradO,
  kOffsetGradQ,
  kOffsetGradK,
  kOffsetGradV,
  kUids
};

class SdpaGraph final : public Graph {
 public:
  explicit SdpaGraph(const Shape& shape) : shape_(shape) {}

  Status build(int arch, cudnnHandle_t handle) {
    TESSERA_RETURN_IF_ERROR(check(arch));
    TESSERA_RETURN_IF_ERROR(checked(graph_.build_operation_graph(handle)));
    TESSERA_RETURN_IF_ERROR(checked(graph_.create_execution_plans({fe::HeurMode_t::A})));
    TESSERA_RETURN_IF_ERROR(checked(graph_.check_support()));
    TESSERA_RETURN_IF_ERROR(checked(graph_.build_plans()));
    return checked(graph_.get_workspace_size(workspace_bytes_));
  }

  // Without a handle: the properties stand for its device.
  Status check_on(int arch, std::string_view device) {
    const auto properties = std::make_shared<fe::DeviceProperties>();
    TESSERA_RETURN_IF_ERROR(checked(properties->deserialize({device.begin(), device.end()})));
    graph_.set_device_properties(properties);
    TESSERA_RETURN_IF_ERROR(check(arch));
    TESSERA_RETURN_IF_ERROR(checked(graph_.build_operation_graph()));
    TESSERA_RETURN_IF_ERROR(checked(graph_.create_execution_plans({fe::HeurMode_t::A})));
    return checked(graph_.check_support());
  }

  Status check(int arch) {
    graph_.set_sm_version(arch);
    describe();
    return checked(graph_.validate());
  }

  int64_t workspace_bytes() const override { return workspace_bytes_; }

  Status run(void* handle, const Pointers& p, float softmax_scale, void* workspace) const override {
    void* pointers[kUids];
    int count = 0;
    const auto put = [&](std::initializer_list<void*> more) {
      for (void* pointer : more) pointers[count++] = pointer;
    };
    put({p.q, p.k, p.v, p.o, &softmax_scale});
    if (shape_.has_stats) put({p.stats});
    if (shape_.backward) put({p.grad_o, p.grad_q, p.grad_k, p.grad_v});
    if (shape_.ragged) {
      put({p.len_q, p.len_k, p.offset_q, p.offset_k, p.offset_v, p.offset_o});
      if (shape_.has_stats) put({p.offset_stats});
      if (shape_.backward) {
        put({p.offset_grad_o, p.offset_grad_q, p.offset_grad_k, p.offset_grad_v});
      }
    }
    try {
      fe::error_t error =
          graph_.execute(static_cast<cudnnHandle_t>(handle), pointers, count, workspace);
      if (error.is_good()) return {};
      return failed("cuDNN: %s", error.get_message().c_str());
    } catch (const std::exception& error) {
      return failed("cuDNN: %s", error.what());
    }
  }

 private:
  static Status checked(fe::error_t error) {
    if (error.is_good()) return {};
    return Status(TESSERA_REFUSED, "cuDNN: " + error.get_message());
  }

  TensorPtr tensor(Uid uid, const char* name, fe::DataType_t type, const std::vector<int64_t>& dim,
                   const std::vector<int64_t>& stride) {
    return graph_.tensor(fe::graph::Tensor_attributes()
                             .set_uid(uid)
                             .set_name(name)
                             .set_data_type(type)
                             .set_dim(dim)
                             .set_stride(stride));
  }

  TensorPtr input(Uid uid, const char* name, fe::DataType_t type, const std::vector<int64_t>& dim,
                  const int64_t (&stride)[4], Uid offset) {
    TensorPtr t = tensor(uid, name, type, dim, {stride, stride + 4});
    if (shape_.ragged) t->set_ragged_offset(offsets(offset, name));
    return t;
  }

  TensorPtr offsets(Uid uid, const std::string& of) {
    return tensor(uid, ("offset of " + of).c_str(), fe::DataType_t::INT64,
                  {shape_.batch + 1, 1, 1, 1}, {1, 1, 1, 1});
  }

  void set_output(const TensorPtr& t, Uid uid, fe::DataType_t type, const std::vector<int64_t>& dim,
                  const int64_t (&stride)[4], Uid offset, const char* name) {
    t->set_output(true).set_uid(uid).set_data_type(type).set_dim(dim).set_stride(
        {stride, stride + 4});
    if (shape_.ragged) t->set_ragged_offset(offsets(offset, name));
  }

  void describe() {
    const Shape& s = shape_;
    const auto type = s.dtype == TESSERA_BF16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF;
    graph_.set_io_data_type(type)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    const TensorPtr q = input(kQ, "q", type, {s.batch, s.hq, s.sq, s.dqk}, s.q, kOffsetQ);
    const TensorPtr k = input(kK, "k", type, {s.batch, s.hk, s.sk, s.dqk}, s.k, kOffsetK);
    const TensorPtr v = input(kV, "v", type, {s.batch, s.hk, s.sk, s.dv}, s.v, kOffsetV);
    const std::vector<int64_t> rows_of_o{s.batch, s.hq, s.sq, s.dv},
        stats_dim{s.batch, s.hq, s.sq, 1};
    if (!s.backward) {
      auto options = fe::graph::SDPA_attributes().set_generate_stats(s.has_stats);
      set_options(options);
      auto [o, stats] = graph_.sdpa(q, k, v, options);
      set_output(o, kO, type, rows_of_o, s.o, kOffsetO, "o");
      if (s.has_stats) {
        set_output(stats, kStats, fe::DataType_t::FLOAT, stats_dim, s.stats, kOffsetStats, "stats");
      }
      return;
    }
    const TensorPtr o = input(kO, "o", type, rows_of_o, s.o, kOffsetO);
    const TensorPtr stats =
        input(kStats, "stats", fe::DataType_t::FLOAT, stats_dim, s.stats, kOffsetStats);
    const TensorPtr grad_o = input(kGradO, "do", type, rows_of_o, s.grad_o, kOffsetGradO);
    auto options = fe::graph::SDPA_backward_attributes();
    set_options(options);
    // Otherwise each sequence has sums in the workspace as long as the longest one's.
    if (s.tokens_q > 0) options.set_max_total_seq_len_q(s.tokens_q);
    if (s.tokens_k > 0) options.set_max_total_seq_len_kv(s.tokens_k);
    auto [dq, dk, dv] = graph_.sdpa_backward(q, k, v, o, grad_o, stats, options);
    set_output(dq, kGradQ, type, {s.batch, s.hq, s.sq, s.dqk}, s.grad_q, kOffsetGradQ, "dq");
    set_output(dk, kGradK, type, {s.batch, s.hk, s.sk, s.dqk}, s.grad_k, kOffsetGradK, "dk");
    set_output(dv, kGradV, type, {s.batch, s.hk, s.sk, s.dv}, s.grad_v, kOffsetGradV, "dv");
  }

  // What both passes are told: scale, band and lengths.
  template <typename Options>
  void set_options(Options& options) {
    const Shape& s = shape_;
    const TensorPtr scale =
        tensor(kScale, "scale", fe::DataType_t::FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1});
    scale->set_is_pass_by_value(true);
    options.set_name("sdpa").set_attn_scale(scale).set_diagonal_alignment(
        s.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT : fe::DiagonalAlignment_t::TOP_LEFT);
    // cuDNN's left bound is the first distance that is hidden.
    if (s.left >= 0) options.set_diagonal_band_left_bound(static_cast<int>(s.left + 1));
    if (s.right >= 0) options.set_diagonal_band_right_bound(static_cast<int>(s.right));
    if (s.ragged) {
      const auto lengths = [&](Uid uid, const char* name) {
        return tensor(uid, name, fe::DataType_t::INT32, {s.batch, 1, 1, 1}, {1, 1, 1, 1});
      };
      options.set_padding_mask(true)
          .set_seq_len_q(lengths(kLenQ, "lengths of q"))
          .set_seq_len_kv(lengths(kLenK, "lengths of k"));
    }
  }

  const Shape shape_;
  fe::graph::Graph graph_;
  int64_t workspace_bytes_ = 0;
};

}  // namespace

namespace {

// What `body` answers; TESSERA_REFUSED where the front end throws.
template <typename Body>
auto guarded(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return Status(TESSERA_REFUSED, std::string("cuDNN: ") + error.what());
  }
}

}  // namespace

Result<std::unique_ptr<Graph>> build_graph(const Shape& shape, int arch, void* handle) {
  return guarded([&]() -> Result<std::unique_ptr<Graph>> {
    auto graph = std::make_unique<SdpaGraph>(shape);
    TESSERA_RETURN_IF_ERROR(graph->build(arch, static_cast<cudnnHandle_t>(handle)));
    return std::unique_ptr<Graph>(std::move(graph));
  });
}

Status check_graph(const Shape& shape, int arch) {
  return guarded([&]() -> Status { return SdpaGraph(shape).check(arch); });
}

Status check_graph(const Shape& shape, int arch, std::string_view device) {
  return guarded([&]() -> Status { return SdpaGraph(shape).check_on(arch, device); });
}

}  // namespace tessera::cuda::cudnn
