// TorchServe 0.12's main(), in the Groovy that its own jar brings, with what 0.12 leaves out: keys outlive the server, a
// Gate stands before each HTTP port, no request is forgotten when a worker dies or a model goes, and SIGTERM answers what
// was accepted before anything is closed.

import io.netty.channel.ChannelFuture
import io.netty.util.internal.logging.InternalLoggerFactory
import io.netty.util.internal.logging.Slf4JLoggerFactory
import java.util.concurrent.TimeUnit
import org.apache.commons.cli.DefaultParser
import org.pytorch.serve.ModelServer
import org.pytorch.serve.metrics.MetricCache
import org.pytorch.serve.servingsdk.impl.PluginsManager
import org.pytorch.serve.util.ConfigManager
import org.pytorch.serve.util.TokenAuthorization

ModelServer server = null
Admission admission = new Admission(
        Long.getLong('serve.body_bytes'), Long.getLong('serve.held_bytes'), Long.getLong('serve.receive_ms'),
        Integer.getInteger('serve.connections'))
try {
    def kept = Keys.read()
    def given = new DefaultParser().parse(ConfigManager.Arguments.getOptions(), args as String[], null, false)
    ConfigManager.init(new ConfigManager.Arguments(given))
    TokenAuthorization.init()
    Keys.install(kept)
    PluginsManager.getInstance().initialize()
    MetricCache.init()
    InternalLoggerFactory.setDefaultFactory(Slf4JLoggerFactory.INSTANCE)
    server = new ModelServer(ConfigManager.getInstance())
    def started = server

    // main()'s own would close the event loops, and with them every request that waits or is computed.
    Runtime.getRuntime().addShutdownHook(new Thread({
        println 'stopping: new requests are refused, what was accepted is answered'
        long left = admission.drain(Long.getLong('serve.drain_ms'), started)
        println left == 0 ? 'stopping: all that was accepted is answered' : "stopping: $left request(s) are given up"
        // As stop(), which would first wait two seconds until Netty has been quiet for so long: nothing can come, for each
        // connection is closed before.
        started.@futures.each { it.channel().close().sync() }
        def groups = started.@serverGroups
        [groups.serverGroup, groups.childGroup, groups.metricsGroup].findAll()
                .collect { it.shutdownGracefully(0, 15, TimeUnit.SECONDS) }.each { it.sync() }
        started.exitModelStore()
    }, 'drain'))

    // The future of a port is that of its close.
    List<ChannelFuture> ports = server.startRESTserver()
    Models.watch()
    // In this order: inference, management, metrics.
    ports.eachWithIndex { port, place -> port.channel().pipeline().addFirst(new Door(admission, place == 0)) }
    Calls.start(server, admission)
    println 'Model server started.'
    ports[0].sync()
} catch (Throwable fault) {
    fault.printStackTrace()
    System.exit(1)
}
// A port closes before the last answers are out: the process ends when the hook has.
if (admission.draining) {
    Thread.currentThread().join()
}
System.exit(1)
