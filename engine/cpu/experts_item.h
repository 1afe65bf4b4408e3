// The experts of one layer. Include vector_avx512.h or vector_avx2.h first, and define BATON_EXPERTS.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "experts.h"
#include "exponential.h"

namespace baton::experts {
namespace {

// The rows of one expert: pairs [first, first + count).
struct Hit {
  int64_t expert, first, count;
  const bf16* rows;
  int64_t stride;
};

struct Pair {
  int64_t token;
  float factor;
};

// The outputs of an expert's first product that one thread computes: units [unit, unit + units) of kGroup activations.
struct Task {
  const Hit* hit;
  int64_t unit, units;
};

class Mixture {
 public:
  explicit Mixture(const Call& call) : call_(call), groups_(call.hidden / kGroup) {
    sort_pairs();
    const int64_t units = call.inner / kGroup, step = call.has_gates ? kUnitsOfTask : 2 * kUnitsOfTask;
    for (const Hit& hit : hits_)
      for (int64_t unit = 0; unit < units; unit += step) tasks_.push_back({&hit, unit, std::min(step, units - unit)});
  }

  void run(Team& team) {
    const int64_t tasks = static_cast<int64_t>(tasks_.size());
    for (int64_t i = Team::next(up_); i < tasks; i = Team::next(up_)) call_.has_gates ? gate_up(tasks_[i]) : up(tasks_[i]);
    team.barrier();
    const int64_t step = kUnit * kUnitsOfTask;
    for (int64_t group = step * Team::next(down_); group < groups_; group = step * Team::next(down_))
      down(group, std::min(step, groups_ - group));
  }

 private:
  // Pairs by expert, and within an expert by token. The rows of an expert with several tokens are gathered.
  void sort_pairs() {
    const Call& c = call_;
    const int64_t count = c.tokens * c.chosen_count;
    std::vector<int64_t> ends(c.experts + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++ends[c.chosen[i] + 1];
    for (int64_t expert = 0; expert < c.experts; ++expert) {
      const int64_t rows = ends[expert + 1];
      ends[expert + 1] += ends[expert];
      if (rows > 0) hits_.push_back({expert, ends[expert], rows, c.rows + ends[expert] * c.hidden, c.hidden});
    }
    pairs_.resize(count);
    for (int64_t i = 0; i < count; ++i) pairs_[ends[c.chosen[i]]++] = {i / c.chosen_count, c.factors[i]};
    for (Hit& hit : hits_) {
      if (hit.count == 1) hit.rows = c.x + pairs_[hit.first].token * c.x_stride;
      for (int64_t row = 0; hit.count > 1 && row < hit.count; ++row)
        std::memcpy(c.rows + (hit.first + row) * c.hidden, c.x + pairs_[hit.first + row].token * c.x_stride,
                    c.hidden * sizeof(bf16));
    }
  }

  void gate_up(const Task& task) {
    const Call& c = call_;
    const Hit& hit = *task.hit;
    const int64_t first_group = (hit.expert * c.inner / kGroup + task.unit) * 2;
    const float* bias = c.gate_up_bias == nullptr ? nullptr : c.gate_up_bias + first_group * kGroup;
    auto activate = [&](const float* sums, int64_t ldc, int64_t first, int rows, int64_t group, int) {
      const int64_t column = (task.unit + group / 2) * kGroup;
      for (int r = 0; r < rows; ++r) {
        Vec gate = load(sums + r * ldc), up = load(sums + r * ldc + kGroup);
        if (bias != nullptr) {
          gate = add(gate, load(bias + group * kGroup));
          up = add(up, load(bias + (group + 1) * kGroup));
        }
        store(c.activated + (hit.first + first + r) * c.inner + column, activation(gate, up));
      }
    };
    Team alone(0, 1);
    matmul(alone, {hit.rows, hit.stride, false}, hit.count, c.gate_up.from_group(first_group, c.hidden), c.hidden,
           2 * task.units, activate);
  }

  void up(const Task& task) {
    const Call& c = call_;
    const Hit& hit = *task.hit;
    auto square = [&](const float* sums, int64_t ldc, int64_t first, int rows, int64_t group, int count) {
      for (int r = 0; r < rows; ++r)
        for (int i = 0; i < count; ++i) {
          const Vec kept = max(splat(0), load(sums + r * ldc + i * kGroup));  // a NaN is the second operand, which is returned
          store(c.activated + (hit.first + first + r) * c.inner + (task.unit + group + i) * kGroup, mul(kept, kept));
        }
    };
    Team alone(0, 1);
    const int64_t first_group = hit.expert * c.inner / kGroup + task.unit;
    matmul(alone, {hit.rows, hit.stride, false}, hit.count, c.gate_up.from_group(first_group, c.hidden), c.hidden, task.units,
           square);
  }

  Vec activation(Vec gate, Vec up) const {
    // The bound comes first: these instructions return their second operand if one of them is a NaN.
    const Vec most = splat(call_.limit), least = splat(-call_.limit);
    gate = min(most, gate);
    up = max(least, min(most, up));
    Vec slope = gate;
    if (call_.cubic != 0.0f) slope = mul_add(mul(splat(call_.cubic), mul(gate, gate)), gate, gate);
    const Vec decay = exp_vector(mul(splat(-call_.sharpness), slope));
    return mul(divide(gate, add(splat(1.0f), decay)), add(up, splat(call_.offset)));
  }

  // Columns [group, group + groups) x 16 of the result. A row adds its experts in the order of their numbers, and the
  // other tokens do not change that order. With AMX they do not change its products either.
  void down(int64_t group, int64_t groups) {
    const Call& c = call_;
    const int64_t column = group * kGroup, columns = groups * kGroup;
    for (int64_t t = 0; t < c.tokens; ++t) std::fill_n(c.sums + t * c.hidden + column, columns, 0.0f);
    for (const Hit& hit : hits_) {
      const float* bias = c.down_bias == nullptr ? nullptr : c.down_bias + hit.expert * c.hidden + column;
      auto sum = [&](const float* results, int64_t ldc, int64_t first, int rows, int64_t at, int count) {
        for (int r = 0; r < rows; ++r) {
          const Pair& pair = pairs_[hit.first + first + r];
          float* to = c.sums + pair.token * c.hidden + column + at * kGroup;
          for (int i = 0; i < count * kGroup; i += kGroup) {
            Vec result = load(results + r * ldc + i);
            if (bias != nullptr) result = add(result, load(bias + at * kGroup + i));
            store(to + i, mul_add(splat(pair.factor), result, load(to + i)));
          }
        }
      };
      Team alone(0, 1);
      matmul(alone, {c.activated + hit.first * c.inner, c.inner, false}, hit.count,
             c.down.from_group(hit.expert * groups_ + group, c.inner), c.inner, groups, sum);
    }
    for (int64_t t = 0; t < c.tokens; ++t)
      for (int64_t i = column; i < column + columns; i += kGroup)
        store(c.out + t * c.hidden + i, load(c.sums + t * c.hidden + i));
  }

  const Call& call_;
  const int64_t groups_;
  std::vector<Pair> pairs_;
  std::vector<Hit> hits_;
  std::vector<Task> tasks_;
  std::atomic<int64_t> up_{0}, down_{0};
};

void run_experts(const Call& call) {
  Mixture mixture(call);
  auto body = [&](Team& team) { mixture.run(team); };
  parallel(call.threads, body);
}

}  // namespace

const Run BATON_EXPERTS = run_experts;

}  // namespace baton::experts
