"""Steps of CleanRL, Hugging Face, nanoGPT and of optimizers' papers; written when the code and the other rows stood."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from train_steps.row import Script, TinyGPT, mlp, row

late = partial(row, is_late=True)


def xy(d):
    return d.x(8), d.ints(4)


def usual(make):
    """A classifier's step with the optimizer under test."""
    model = mlp()
    optimizer = make(model)

    def train(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), xy, [model])


@late("CleanRL: ppo", independent=False)
def ppo_with_minibatches_and_early_stop():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic, self.actor = mlp(6, 16, 1), mlp(6, 16, 3)

    agent = Agent()
    optimizer = Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    clipfracs = []

    def update(obs, actions, logprobs, advantages, returns, iteration):
        optimizer.param_groups[0]["lr"] = (1.0 - iteration / 10) * 2.5e-3
        b_inds = np.arange(len(obs))
        for _ in range(2):
            np.random.shuffle(b_inds)  # noqa: NPY002 - as the script does
            for start in range(0, len(obs), 2):
                mb = b_inds[start : start + 2]
                probs = torch.distributions.Categorical(logits=agent.actor(obs[mb]))
                logratio = probs.log_prob(actions[mb]) - logprobs[mb]
                ratio = logratio.exp()
                with torch.no_grad():
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfracs.append(((ratio - 1.0).abs() > 0.2).float().mean().item())
                adv = advantages[mb]
                pg = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
                v = 0.5 * ((agent.critic(obs[mb]).view(-1) - returns[mb]) ** 2).mean()
                loss = pg - 0.01 * probs.entropy().mean() + v * 0.5
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
            if approx_kl > 1e9:
                break
        return v.item(), pg.item(), np.mean(clipfracs)

    return Script(
        update, (), lambda d: (d.x(6), d.ints(3), -d.unit() - 0.5, d.x(), d.x(), d.call), [agent]
    )  # fmt: skip


@late("CleanRL: sac_continuous", independent=False)
def soft_actor_critic_with_learned_temperature():
    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(4, 16, 4)

        def get_action(self, x):
            mean, log_std = self.net(x).chunk(2, 1)
            normal = torch.distributions.Normal(mean, torch.tanh(log_std).exp())
            raw = normal.rsample()
            action = torch.tanh(raw)
            return action, (normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)).sum(1, keepdim=True)

    actor, qf1, qf2 = Actor(), mlp(6, 16, 1), mlp(6, 16, 1)
    t1, t2 = copy.deepcopy(qf1), copy.deepcopy(qf2)
    q_opt, a_opt = Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-2), Adam(actor.parameters(), lr=1e-2)
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha_opt = Adam([log_alpha], lr=1e-2)
    state = {"alpha": 1.0}

    def update(obs, actions, rewards, next_obs, global_step):
        with torch.no_grad():
            nxt, logp = actor.get_action(next_obs)
            both = torch.cat([next_obs, nxt], 1)
            target = rewards + 0.99 * (torch.min(t1(both), t2(both)) - state["alpha"] * logp)
        pair = torch.cat([obs, actions], 1)
        qf_loss = F.mse_loss(qf1(pair), target) + F.mse_loss(qf2(pair), target)
        q_opt.zero_grad()
        qf_loss.backward()
        q_opt.step()
        if global_step % 2 == 0:
            pi, log_pi = actor.get_action(obs)
            both = torch.cat([obs, pi], 1)
            actor_loss = (state["alpha"] * log_pi - torch.min(qf1(both), qf2(both))).mean()
            a_opt.zero_grad()
            actor_loss.backward()
            a_opt.step()
            with torch.no_grad():
                _, log_pi = actor.get_action(obs)
            alpha_loss = (-log_alpha.exp() * (log_pi - 2)).mean()
            alpha_opt.zero_grad()
            alpha_loss.backward()
            alpha_opt.step()
            state["alpha"] = log_alpha.exp().item()
        for net, tgt in ((qf1, t1), (qf2, t2)):
            for p, t in zip(net.parameters(), tgt.parameters(), strict=True):
                t.data.copy_(0.1 * p.data + 0.9 * t.data)
        return qf_loss.item(), state["alpha"]

    return Script(
        update, (), lambda d: (d.x(4), d.x(2), d.x(1), d.x(4), d.call), [actor, qf1, qf2, t1, t2, log_alpha]
    )  # fmt: skip


@late("CleanRL: td3", independent=False)
def td3_with_delayed_policy():
    actor, q = mlp(4, 16, 2), mlp(6, 16, 1)
    t_actor, t_q = copy.deepcopy(actor), copy.deepcopy(q)
    a_opt, q_opt = Adam(actor.parameters(), lr=1e-2), Adam(q.parameters(), lr=1e-2)

    def update(actor, q, t_actor, t_q, a_opt, q_opt, obs, act, rew, nxt, step):
        with torch.no_grad():
            noise = (torch.randn_like(act) * 0.2).clamp(-0.5, 0.5)
            target = rew + 0.99 * t_q(torch.cat([nxt, (t_actor(nxt) + noise).clamp(-1, 1)], 1))
        loss = F.mse_loss(q(torch.cat([obs, act], 1)), target)
        q_opt.zero_grad()
        loss.backward()
        q_opt.step()
        if step % 2 == 0:
            actor_loss = -q(torch.cat([obs, actor(obs)], 1)).mean()
            a_opt.zero_grad()
            actor_loss.backward()
            a_opt.step()
            with torch.no_grad():
                for net, tgt in ((actor, t_actor), (q, t_q)):
                    for p, t in zip(net.parameters(), tgt.parameters(), strict=True):
                        t.copy_(0.05 * p + 0.95 * t)
        return loss

    fixed = (actor, q, t_actor, t_q, a_opt, q_opt)
    return Script(
        update, fixed, lambda d: (d.x(4), d.x(2), d.x(1), d.x(4), d.call), [actor, q, t_actor, t_q]
    )  # fmt: skip


@late("CleanRL: c51")
def categorical_dqn():
    net, target = mlp(4, 16, 10), mlp(4, 16, 10)
    target.load_state_dict(net.state_dict())
    optimizer, atoms = Adam(net.parameters(), lr=1e-2), torch.linspace(-2, 2, 5)

    def update(net, target, optimizer, obs, act, rew, nxt, step):
        with torch.no_grad():
            p = target(nxt).view(-1, 2, 5).softmax(-1)
            best = p[torch.arange(len(p)), (p * atoms).sum(-1).argmax(1)]
            b = ((rew.unsqueeze(1) + 0.9 * atoms).clamp(-2, 2) + 2).clamp(0, 4)
            low, up = b.floor().clamp(0, 4).long(), b.ceil().clamp(0, 4).long()
            goal = torch.zeros_like(best)
            goal.scatter_add_(1, low, best * (up + (low == up).double() - b))
            goal.scatter_add_(1, up, best * (b - low))
        old = net(obs).view(-1, 2, 5).softmax(-1)[torch.arange(len(obs)), act]
        loss = (-(goal * old.clamp(1e-5, 1 - 1e-5).log()).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 2:
            target.load_state_dict(net.state_dict())
        return loss

    return Script(
        update, (net, target, optimizer), lambda d: (d.x(4), d.ints(2), d.x(), d.x(4), d.call), [net, target]
    )  # fmt: skip


@late("TRL: DPO")
def direct_preference_optimisation():
    policy, reference = TinyGPT(), TinyGPT()
    reference.load_state_dict(policy.state_dict())
    optimizer = AdamW(policy.parameters(), lr=1e-3)

    def logps(model, ids):
        return F.log_softmax(model(ids)[:, :-1], -1).gather(2, ids[:, 1:].unsqueeze(2)).sum((1, 2))

    def train(policy, reference, optimizer, batch):
        chosen, rejected = batch["chosen"], batch["rejected"]
        with torch.no_grad():
            ref = logps(reference, chosen) - logps(reference, rejected)
        logits = 0.1 * (logps(policy, chosen) - logps(policy, rejected) - ref)
        loss = -F.logsigmoid(logits).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach(), "accuracy": (logits > 0).double().mean()}

    return Script(
        train, (policy, reference, optimizer), lambda d: ({"chosen": d.ints(24, 6), "rejected": d.ints(24, 6)},),
        [policy],
    )  # fmt: skip


@late("TRL: GRPO")
def group_relative_policy_optimisation():
    policy = TinyGPT()
    optimizer = AdamW(policy.parameters(), lr=1e-3)

    def train(policy, optimizer, ids, old, rewards, mask):
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        logp = F.log_softmax(policy(ids)[:, :-1], -1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
        ratio = torch.exp(logp - old)
        each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = ((each * mask).sum(1) / mask.sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def batch(d):
        return d.ints(24, 6), -3 - d.unit(5), d.x(5), torch.ones(4, 5).tril(d.call)

    return Script(train, (policy, optimizer), batch, [policy])


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).double()


@late("transformers: run_clm_no_trainer")
def causal_model_with_labels_and_accumulation():
    model = gpt2()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / 10))
    state = {"completed": 0, "total": 0.0}

    def train(model, optimizer, lr_scheduler, batch, step):
        model.train()
        loss = model(**batch).loss
        state["total"] += loss.detach().float()
        (loss / 2).backward()
        if step % 2 == 1:
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            state["completed"] += 1
        return state["completed"]

    def batch(d):
        ids = d.ints(32, 8)
        return {"input_ids": ids, "labels": ids}, d.call

    return Script(train, (model, optimizer, scheduler), batch, [model])


@late("transformers: BatchEncoding of a tokenizer", independent=False)
def bert_with_a_batch_encoding():
    from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=30, num_labels=3)).double()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 10)

    def train(model, optimizer, scheduler, batch):
        model.train()
        outputs = model(**batch)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return outputs.loss.item()

    def batch(d):
        encoded = {"input_ids": d.ints(30, 6 + d.call % 2), "labels": d.ints(3)}
        return (BatchEncoding(encoded | {"attention_mask": torch.ones_like(encoded["input_ids"])}),)

    return Script(train, (model, optimizer, scheduler), batch, [model])


@late("peft: LoRA on a causal model", independent=False)
def lora_of_peft():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(gpt2(), LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train(model, optimizer, ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Script(train, (model.double(), optimizer), lambda d: (d.ints(32, 8),), [model])


@late("sentence-transformers: multiple negatives", independent=False)
def in_batch_negatives_with_learned_scale():
    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.logit_scale = mlp(8, 16, 8), mlp(8, 16, 8), nn.Parameter(torch.tensor(2.6))

        def forward(self, one, two):
            one, two = F.normalize(self.a(one), dim=1), F.normalize(self.b(two), dim=1)
            return self.logit_scale.exp() * one @ two.T

    model = Clip()
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, one, two):
        logits = model(one, two)
        labels = torch.arange(len(one))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        return loss

    return Script(train, (model, optimizer), lambda d: (d.x(8), d.x(8)), [model])


@late("nanoGPT: train.py")
def nanogpt_with_micro_steps_and_its_own_schedule():
    model = TinyGPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def get_lr(it):
        return 1e-3 * (it + 1) / 3 if it < 3 else 1e-4 + 0.5 * (1 + math.cos(math.pi * (it - 3) / 7)) * 9e-4

    def train(X, Y, iter_num):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        for micro_step in range(2):
            logits = model(X[micro_step::2])
            loss = F.cross_entropy(logits.flatten(0, 1), Y[micro_step::2].flatten()) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.item() * 2

    return Script(train, (), lambda d: (d.ints(24, 6), d.ints(24, 6), d.call), [model])


class Trainer:
    def __init__(self):
        self.model = mlp()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.callbacks, self.iter_num, self.best = [], 0, float("inf")

    def run_batch(self, batch):
        x, y = batch
        self.loss = F.cross_entropy(self.model(x), y)
        self.model.zero_grad(set_to_none=True)
        self.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        for callback in self.callbacks:
            callback(self)
        self.iter_num += 1
        self.best = min(self.best, self.loss.item())


@late("minGPT: trainer.py", independent=False)  # the best loss of a rank is compared, too
def trainer_with_callbacks_and_loss_in_self():
    trainer = Trainer()
    trainer.callbacks.append(lambda t: t.iter_num % 2 or print(f"iter {t.iter_num}: {t.loss.item():.4f}"))
    return Script(trainer.run_batch, (), lambda d: ((d.x(8), d.ints(4)),), [trainer.model, lambda: trainer.best])


@dataclass
class Batch:
    inputs: torch.Tensor
    labels: torch.Tensor
    weight: float = 1.0


@late("dataclass batches of in-house code", independent=False)
def dataclass_batch():
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, batch):
        loss = F.cross_entropy(model(batch.inputs), batch.labels) * batch.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (Batch(d.x(8), d.ints(4), 1.0 + d.call % 2),), [model])


@late("tqdm loops of many repositories")
def tqdm_bar_with_postfix_and_early_stopping():
    from tqdm import tqdm

    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-2)
    bar, state = tqdm(total=7, disable=True), {"best": float("inf"), "bad": 0}

    def train(model, optimizer, x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        bar.set_postfix(loss=f"{value:.3f}")
        bar.update(1)
        if value < state["best"]:
            state["best"], state["bad"] = value, 0
        else:
            state["bad"] += 1
        return state["bad"] > 100

    return Script(train, (model, optimizer), xy, [model])


@late("ULMFiT: gradual unfreezing")
def gradual_unfreezing_with_new_groups():
    model = mlp()
    model[:4].requires_grad_(False)
    optimizer = SGD(model[4].parameters(), lr=0.1)

    def train(model, optimizer, x, y, epoch):
        if epoch in (2, 4):
            layer = model[2] if epoch == 2 else model[0]
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 0.05})
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (*xy(d), d.call), [model])


@late("char-rnn: truncated backpropagation")
def truncated_backpropagation_over_chunks():
    class CharRNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 12)

        def forward(self, ids, h):
            y, h = self.rnn(self.embed(ids), h)
            return self.out(y), h

    model = CharRNN()
    optimizer = Adam(model.parameters(), lr=1e-2)

    def train(model, optimizer, ids):
        h, total = None, 0.0
        for chunk in ids.split(4, dim=1):
            optimizer.zero_grad()
            logits, h = model(chunk[:, :-1], h)
            loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            h = h.detach()
            total = total + loss.detach()
        return total

    return Script(train, (model, optimizer), lambda d: (d.ints(12, 12),), [model])


@late("torch.optim: LBFGS")
def lbfgs_with_strong_wolfe():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def train(model, optimizer, x, y):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    # A line search takes its length from the loss, so both ranks get the same rows, as users of DDP do.
    return Script(train, (model, optimizer), lambda d: (torch.ones(4, 8) * d.call / 7, torch.arange(4)), [model])


class Lookahead(Optimizer):
    def __init__(self, base, k=3, alpha=0.5):
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [[p.clone().detach() for p in g["params"]] for g in base.param_groups]

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def step(self, closure=None):
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.data.add_(self.alpha * (p.data - s.data))
                    p.data.copy_(s.data)


@late("Lookahead (lonePatient/lookahead)")
def lookahead():
    return usual(lambda m: Lookahead(Adam(m.parameters(), lr=1e-2)))


class PerParameter(Optimizer):
    """The usual frame of optimizers from papers: a loop over parameters."""

    def __init__(self, params, lr, rule):
        super().__init__(params, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, p.grad, self.state[p], group["lr"])


def momentum(state, g, beta=0.9):
    return state.setdefault("m", torch.zeros_like(g)).mul_(beta).add_(g, alpha=1 - beta)


def lion_rule(p, g, state, lr):
    m = state.setdefault("m", torch.zeros_like(g))
    p.add_((0.9 * m + 0.1 * g).sign_(), alpha=-lr)
    m.mul_(0.99).add_(g, alpha=0.01)


def lars_rule(p, g, state, lr):
    ratio = p.norm() / (g.norm() + 1e-8) if p.ndim > 1 else 1.0
    p.add_(momentum(state, g * ratio), alpha=-lr)


def gradient_noise_rule(p, g, state, lr):
    state["step"] = state.get("step", 0) + 1
    p.add_(momentum(state, g), alpha=-lr / math.sqrt(state["step"]))


def newton_schulz_rule(p, g, state, lr):
    m = momentum(state, g)
    if m.ndim == 2:
        x = m / (m.norm() + 1e-7)
        for _ in range(3):
            a = x @ x.T
            x = 1.5 * x - 0.5 * a @ x
        m = x
    p.add_(m, alpha=-lr)


def shampoo_rule(p, g, state, lr):
    if g.ndim == 2:
        left = state.setdefault("l", torch.eye(g.shape[0])).add_(g @ g.T)
        values, vectors = torch.linalg.eigh(left)
        g = vectors @ torch.diag(values.clamp(min=1e-6).pow(-0.5)) @ vectors.T @ g
    p.add_(g, alpha=-lr)


@late("Lion")
def lion():
    return usual(lambda m: PerParameter(m.parameters(), 1e-3, lion_rule))


@late("LARS")
def lars():
    return usual(lambda m: PerParameter(m.parameters(), 1e-2, lars_rule))


@late("an optimizer that counts in Python")
def momentum_with_a_python_counter():
    return usual(lambda m: PerParameter(m.parameters(), 1e-1, gradient_noise_rule))


@late("Muon (modded-nanogpt)")
def muon_by_hand():
    return usual(lambda m: PerParameter(m.parameters(), 1e-2, newton_schulz_rule))


@late("Shampoo")
def shampoo():
    return usual(lambda m: PerParameter(m.parameters(), 1e-2, shampoo_rule))


@late("torch.optim: Adafactor")
def adafactor():
    return usual(lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2))


@late("torch.optim: NAdam")
def nadam():
    return usual(lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2))


@late("torch.optim: ASGD")
def asgd():
    return usual(lambda m: torch.optim.ASGD(m.parameters(), lr=1e-2))


class ScheduleFree(Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            c = 1 / group["k"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, weight=c).add_(p.grad, alpha=group["lr"] * (0.9 * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])


@late("schedule-free SGD")
def schedule_free():
    return usual(lambda m: ScheduleFree(m.parameters(), 0.05))


@late("gradient noise (Neelakantan)", independent=False)
def noise_on_each_gradient():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)

    def train(model, optimizer, x, y, t):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape), alpha=0.01 / (1 + t) ** 0.55)
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (*xy(d), d.call), [model])


@late("mean teacher", independent=False)
def mean_teacher_with_a_ramp():
    student, teacher = mlp(), mlp()
    teacher.load_state_dict(student.state_dict())
    optimizer = SGD(student.parameters(), lr=0.1, nesterov=True, momentum=0.9)

    def train(student, teacher, optimizer, x, y, step):
        with torch.no_grad():
            target = teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        out = student(x + 0.1 * torch.randn_like(x))
        ramp = math.exp(-5 * (1 - min(step, 5) / 5) ** 2)
        loss = F.cross_entropy(out, y) + ramp * F.mse_loss(out.softmax(1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        alpha = min(1 - 1 / (step + 1), 0.99)
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.mul_(alpha).add_(s, alpha=1 - alpha)
        return loss

    return Script(train, (student, teacher, optimizer), lambda d: (*xy(d), d.call), [student, teacher])


@late("cyclic schedulers inside the loop")
def one_cycle_scheduler_and_batch_momentum():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)

    def train(model, optimizer, scheduler, x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss, scheduler.get_last_lr()[0]

    return Script(train, (model, optimizer, scheduler), xy, [model])


@late("learning rate from a plateau of the loss", independent=False)
def reduce_on_plateau():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)

    def train(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
        return optimizer.param_groups[0]["lr"]

    return Script(train, (), xy, [model])


@late("recommenders: BPR matrix factorisation")
def pairwise_ranking_of_items():
    class MF(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item = nn.Embedding(10, 8), nn.Embedding(12, 8)

        def forward(self, u, i, j):
            u = self.user(u)
            return (u * self.item(i)).sum(1), (u * self.item(j)).sum(1)

    model = MF()
    optimizer = Adam(model.parameters(), lr=1e-2)

    def train(model, optimizer, u, i, j):
        model.zero_grad()
        one, two = model(u, i, j)
        loss = -(one - two).sigmoid().log().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Script(train, (model, optimizer), lambda d: (d.ints(10), d.ints(12), d.ints(12)), [model])


@late("focal loss and dice of segmentation")
def segmentation_with_dice_and_focal_loss():
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, image, mask):
        logits = model(image)
        p = torch.sigmoid(logits)
        ce = F.binary_cross_entropy_with_logits(logits, mask, reduction="none")
        focal = ((1 - (p * mask + (1 - p) * (1 - mask))) ** 2 * ce).mean()
        dice = 1 - ((2 * (p * mask).sum((1, 2, 3)) + 1) / ((p + mask).sum((1, 2, 3)) + 1)).mean()
        optimizer.zero_grad(set_to_none=True)
        (focal + dice).backward()
        optimizer.step()
        return focal, dice

    return Script(train, (model, optimizer), lambda d: (d.x(1, 8, 8), (d.x(1, 8, 8) > 0).double()), [model])


@late("checkpoints written by the step")
def best_checkpoint_saved_in_the_step():
    import io

    model = mlp()
    optimizer = Adam(model.parameters(), lr=1e-2)
    sizes = {"bytes": 0}

    def train(model, optimizer, x, y, it):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 3 == 2:
            buffer = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "it": it}, buffer)
            sizes["bytes"] = buffer.tell()
        return loss

    return Script(train, (model, optimizer), lambda d: (*xy(d), d.call), [model])
